"""Trains on MovieLens 100K without the shuffler, with it, and with pieces, and compares the AUC.

Runs the entry point on two ranks for three seeds, without dropout:

    python -m benchmarks.movielens_equivalence FOLDER_WITH_u.data_AND_u.user
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import markdown_table, write_tables
from benchmarks.torchrun import torchrun

RESULT = Path(__file__).parent / "results" / "movielens_equivalence.json"
README = Path(__file__).parent / "README.md"
CONFIG = "hstu/training/configs/movielens_100k_ranking.gin"
SEEDS = (1, 2, 3)
RANKS = 2
BALANCED = "TrainerArgs.enable_balanced_shuffler=True"
# Whole samples balance 32 rows well enough that none is cut.
FEW_ROWS = ["TrainerArgs.train_batch_size=4", "TrainerArgs.eval_batch_size=4"]
PIECES = "4 rows, in pieces"
ARMS = {
    "as loaded": [],
    "balanced": [BALANCED],
    "4 rows, as loaded": FEW_ROWS,
    PIECES: [
        *FEW_ROWS,
        BALANCED,
        "TrainerArgs.balance_split=True",
        "TrainerArgs.balance_equal_rows=False",
    ],
}


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    raw: Path = parse_arguments(__doc__, folder={"type": Path}).folder
    rows, cut = [], []
    with TemporaryDirectory() as folder:
        prepared = Path(folder) / "ml-100k"
        preprocess = ["-m", "commons.datasets.movielens_preprocess", "--dataset", "ml-100k"]
        subprocess.run([sys.executable, *preprocess, "--raw", raw, "--out", prepared], check=True)
        for seed in SEEDS:
            logs = {
                arm: _log(prepared, Path(folder) / f"{seed}-{arm}", seed, bindings)
                for arm, bindings in ARMS.items()
            }
            aucs = {arm: [line["AUC"] for line in log if line["kind"] == "eval"] for arm, log in logs.items()}
            rows.append({"seed": seed, **aucs})
            of_pieces = [line["samples_cut"] for line in logs[PIECES] if line["kind"] == "train"]
            cut.append(sum(of_pieces) / len(of_pieces))
    figures = {
        "ranks": RANKS,
        "config": CONFIG,
        "auc_of_evaluations": rows,
        "samples_cut_per_step": cut,
        "machine": machine(),
    }
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    table = make_table(rows)
    write_tables(README, "movielens", {"AUC": table})
    print(table)


def make_table(rows: list[dict]) -> str:
    """Returns a table with the final AUC of each arm per seed, and the means."""
    at_end = [[of_seed[arm][-1] for arm in ARMS] for of_seed in rows]
    means = [sum(column) / len(column) for column in zip(*at_end, strict=True)]
    names = [*(f"{of_seed['seed']}" for of_seed in rows), "mean"]
    cells = [[f"{auc:.4f}" for auc in line] for line in (*at_end, means)]
    return markdown_table(["seed", *ARMS], [[name, *line] for name, line in zip(names, cells, strict=True)])


def _log(dataset: Path, log_dir: Path, seed: int, settings: list[str]) -> list[dict]:
    """Runs one training and returns the lines of its log."""
    bindings = [
        f"DatasetArgs.dataset_path='{dataset}'",
        f"TrainerArgs.log_dir='{log_dir}'",
        f"TrainerArgs.seed={seed}",
        "NetworkArgs.hidden_dropout=0.0",
        *settings,
    ]
    module = "hstu.training.pretrain_gr_ranking"
    torchrun(RANKS, module, "--gin-config-file", CONFIG, "--gin-bindings", *bindings)
    return [json.loads(line) for line in (log_dir / "train.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
