"""Compares HSTU retrieval on MovieLens 100K with the shuffler, without it, and with popular items.

Runs the entry point on two ranks for three seeds, without dropout. Needs a folder with `u.data` and `u.user`.
Measures HR@10 over all items on each user's last item, for the models and for items ranked by frequency.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Record
from benchmarks.movielens_equivalence import BALANCED, SEEDS, prepare, run_trainings
from commons.datasets import UserSequences, UserSequenceSource

CONFIG = "hstu/training/configs/movielens_100k_retrieval.gin"
K = 10
METRIC = f"HR@{K}"
ARMS = {"as_loaded": (), "balanced": (BALANCED,)}


def measure(folder: str) -> Record:
    """Returns the means of the last evaluations, and the largest difference between the arms."""
    last: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with TemporaryDirectory() as made:
        prepared = prepare(Path(folder), Path(made))
        for seed in SEEDS:
            logs = run_trainings("hstu.training.pretrain_gr_retrieval", CONFIG, ARMS, prepared, seed)
            for arm, log in logs.items():
                last[arm].append([line[METRIC] for line in log if line["kind"] == "eval"][-1])
        popular = _score_popular(prepared)
    differences = np.abs(np.subtract(last["as_loaded"], last["balanced"]))
    return {
        "most_popular": {METRIC: popular},
        "mean": {arm: {METRIC: statistics.mean(values)} for arm, values in last.items()},
        "largest_difference": {METRIC: float(differences.max())},
    }


def _score_popular(prepared: Path) -> float:
    """Returns the metric of ranking items by frequency in training. Smaller ids win ties."""
    sequences = UserSequences.open(prepared, "ml-100k")
    longest = int(np.diff(sequences.offsets).max())  # the whole history, except for the held-out item
    train, evaluation = (
        UserSequenceSource(sequences, split, longest, num_held_out=1) for split in ("train", "eval")
    )
    counts = np.bincount(np.concatenate([train[user].items for user in range(len(train))]))
    ranking = np.argsort(-counts, kind="stable")[:K]
    targets = [int(evaluation[user].items[-1]) for user in range(len(evaluation))]
    return float(np.isin(targets, ranking).mean())


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    balanced, as_loaded = (figures["mean"][arm][METRIC] for arm in ("balanced", "as_loaded"))
    popular, difference = (figures[name][METRIC] for name in ("most_popular", "largest_difference"))
    text = f"{balanced:.3f} with the stage, {as_loaded:.3f} without, {popular:.3f} for the {K} most popular"
    return {"retrieval HR": f"{text}; runs of one seed differ by at most {difference:.4f}"}
