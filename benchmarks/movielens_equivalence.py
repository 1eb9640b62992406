"""Compares the AUC of training on MovieLens 100K without the shuffler, with it, and with pieces.

Runs the entry point on two ranks for three seeds, without dropout. Needs a folder with `u.data` and `u.user`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Record, run_torchrun
from benchmarks.markdown import Cell, make_table

CONFIG = "hstu/training/configs/movielens_100k_ranking.gin"
SEEDS, RANKS = (1, 2, 3), 2
BALANCED = "TrainerArgs.enable_balanced_shuffler=True"
# With 32 rows, whole samples balance so well that no sample is cut.
FEW_ROWS = ("TrainerArgs.train_batch_size=4", "TrainerArgs.eval_batch_size=4")
PIECES = "4 rows, in pieces"
ARMS = {
    "as loaded": (),
    "balanced": (BALANCED,),
    "4 rows, as loaded": FEW_ROWS,
    PIECES: (*FEW_ROWS, BALANCED, "TrainerArgs.balance_split=True", "TrainerArgs.balance_equal_rows=False"),
}


def measure(folder: str) -> Record:
    """Returns the AUC of every evaluation, and the number of samples cut per step."""
    logs = _train_seeds(folder)
    aucs = [
        {arm: [line["AUC"] for line in log[arm] if line["kind"] == "eval"] for arm in ARMS} for log in logs
    ]
    return {
        "auc_of_evaluations": [{"seed": seed, **of_arms} for seed, of_arms in zip(SEEDS, aucs, strict=True)],
        "samples_cut_per_step": [
            np.mean([line["samples_cut"] for line in log[PIECES] if line["kind"] == "train"]) for log in logs
        ],
    }


def prepare(raw: str, dataset: Path) -> None:
    """Prepares MovieLens 100K of the folder `raw` in the folder `dataset`."""
    preprocess = ["-m", "commons.datasets.movielens_preprocess", "--dataset", "ml-100k"]
    subprocess.run([sys.executable, *preprocess, "--raw", raw, "--out", dataset], check=True)


def _train_seeds(raw: str) -> list[dict[str, list[Record]]]:
    """Trains once with each seed and each arm, and returns the lines of each arm's log, for each seed."""
    logs: list[dict[str, list[Record]]] = []
    with TemporaryDirectory() as folder:
        dataset = Path(folder) / "ml-100k"
        prepare(raw, dataset)
        for seed in SEEDS:
            logs.append({})
            for number, (arm, settings) in enumerate(ARMS.items()):
                log_dir = Path(folder) / f"{seed}-{number}"
                bindings = [
                    f"DatasetArgs.dataset_path='{dataset}'",
                    f"TrainerArgs.log_dir='{log_dir}'",
                    f"TrainerArgs.seed={seed}",
                    "NetworkArgs.hidden_dropout=0.0",
                    *settings,
                ]
                command = ["hstu.training.pretrain_gr_ranking", "--gin-config-file", CONFIG]
                run_torchrun(RANKS, *command, "--gin-bindings", *bindings)
                lines = (log_dir / "train.jsonl").read_text().splitlines()
                logs[-1][arm] = [json.loads(line) for line in lines]
    return logs


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker: final AUCs, their largest difference, and samples cut."""
    seeds, cut = figures["auc_of_evaluations"], figures["samples_cut_per_step"]
    rows = [{"seed": row["seed"], **{arm: row[arm][-1] for arm in ARMS}} for row in seeds]
    rows.append({"seed": "mean", **{arm: sum(row[arm] for row in rows) / len(rows) for arm in ARMS}})
    columns: dict[str, Cell] = {"seed": "{seed}"}
    pairs = (("as loaded", "balanced"), ("4 rows, as loaded", PIECES))
    differences = [
        np.abs(np.subtract(row[before], row[after])).max() for row in seeds for before, after in pairs
    ]
    return {
        "movielens AUC": make_table(rows, columns | {arm: f"{{{arm}:.4f}}" for arm in ARMS}),
        "movielens difference": f"{max(differences):.4f}",
        "movielens cut": f"{min(cut):.2f} to {max(cut):.2f}",
    }
