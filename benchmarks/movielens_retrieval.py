"""Trains HSTU retrieval on MovieLens 100K with and without the shuffler, and compares popular items.

Runs the entry point on two ranks for three seeds, without dropout:

    python -m benchmarks.movielens_retrieval FOLDER_WITH_u.data_AND_u.user

Prints HR@10 and NDCG@10 over all items on each user's last item, and those of the items ranked by frequency
in training.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.torchrun import torchrun
from commons.datasets import UserSequences, UserSequenceSource

RESULT = Path(__file__).parent / "results" / "movielens_retrieval.json"
CONFIG = "hstu/training/configs/movielens_100k_retrieval.gin"
SEEDS = (1, 2, 3)
RANKS = 2
K = 10
METRICS = (f"HR@{K}", f"NDCG@{K}")
ARMS = {"as_loaded": [], "balanced": ["TrainerArgs.enable_balanced_shuffler=True"]}


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    raw: Path = parse_arguments(__doc__, folder={"type": Path}).folder
    rows = []
    with TemporaryDirectory() as folder:
        prepared = Path(folder) / "ml-100k"
        preprocess = ["-m", "commons.datasets.movielens_preprocess", "--dataset", "ml-100k"]
        subprocess.run([sys.executable, *preprocess, "--raw", raw, "--out", prepared], check=True)
        popular = _of_popular(prepared)
        for seed in SEEDS:
            evaluations = {
                arm: _evaluations(prepared, Path(folder) / f"{seed}-{arm}", seed, bindings)
                for arm, bindings in ARMS.items()
            }
            rows.append({"seed": seed, **evaluations})
            print(json.dumps({arm: of_arm[-1] for arm, of_arm in evaluations.items()}), flush=True)
    summary = _summary(rows, popular)
    print(json.dumps(summary, indent=1))
    figures = {"ranks": RANKS, "config": CONFIG, **summary, "evaluations": rows, "machine": machine()}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _summary(rows: list[dict], popular: dict[str, float]) -> dict[str, object]:
    """Returns means of the last evaluations over the seeds, and the largest difference between arms."""
    means = {
        arm: {metric: statistics.mean(of_seed[arm][-1][metric] for of_seed in rows) for metric in METRICS}
        for arm in ARMS
    }
    differences = {
        metric: max(
            abs(of_seed["as_loaded"][-1][metric] - of_seed["balanced"][-1][metric]) for of_seed in rows
        )
        for metric in METRICS
    }
    return {
        "most_popular": popular,
        "mean": means,
        "balanced_over_most_popular": {
            metric: means["balanced"][metric] / popular[metric] for metric in METRICS
        },
        "largest_difference": differences,
    }


def _of_popular(prepared: Path) -> dict[str, float]:
    """Returns the metrics of ranking items by frequency in training; ties go to smaller ids."""
    sequences = UserSequences.open(prepared, "ml-100k")
    longest = int(np.diff(sequences.offsets).max())  # the whole history, except for the held-out item
    train, evaluation = (
        UserSequenceSource(sequences, split, longest, num_held_out=1) for split in ("train", "eval")
    )
    counts = np.bincount(np.concatenate([train[user].items for user in range(len(train))]))
    ranking = np.argsort(-counts, kind="stable")[:K].tolist()
    targets = [int(evaluation[user].items[-1]) for user in range(len(evaluation))]
    places = [ranking.index(target) for target in targets if target in ranking]
    gains = sum(1 / math.log2(place + 2) for place in places)
    return dict(zip(METRICS, (len(places) / len(targets), gains / len(targets)), strict=True))


def _evaluations(dataset: Path, log_dir: Path, seed: int, settings: list[str]) -> list[dict[str, float]]:
    """Runs one training and returns the metrics of each evaluation, in order."""
    bindings = [
        f"DatasetArgs.dataset_path='{dataset}'",
        f"TrainerArgs.log_dir='{log_dir}'",
        f"TrainerArgs.seed={seed}",
        "NetworkArgs.hidden_dropout=0.0",
        *settings,
    ]
    module = "hstu.training.pretrain_gr_retrieval"
    torchrun(RANKS, module, "--gin-config-file", CONFIG, "--gin-bindings", *bindings)
    lines = [json.loads(line) for line in (log_dir / "train.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in METRICS} for line in lines if line["kind"] == "eval"]


if __name__ == "__main__":
    main()
