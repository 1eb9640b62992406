"""Compares HSTU retrieval on MovieLens 100K with the shuffler and without it.

Runs the entry point on two ranks for three seeds, without dropout. Needs a folder with `u.data` and `u.user`.
Measures HR@10 over all items on each user's last item.
"""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.harness import Record
from benchmarks.movielens_equivalence import BALANCED, train_seeds

CONFIG = "hstu/training/configs/movielens_100k_retrieval.gin"
METRIC = "HR@10"
ARMS = {"as_loaded": (), "balanced": (BALANCED,)}


def measure(folder: str) -> Record:
    """Returns the means of the last evaluations, and the largest difference between the arms."""
    logs = train_seeds("hstu.training.pretrain_gr_retrieval", CONFIG, ARMS, folder)
    last = {arm: [[line[METRIC] for line in log[arm] if METRIC in line][-1] for log in logs] for arm in ARMS}
    differences = np.abs(np.subtract(last["as_loaded"], last["balanced"]))
    return {
        "mean": {arm: {METRIC: statistics.mean(values)} for arm, values in last.items()},
        "largest_difference": {METRIC: float(differences.max())},
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    balanced, as_loaded = (figures["mean"][arm][METRIC] for arm in ("balanced", "as_loaded"))
    text = f"{balanced:.3f} with the stage, {as_loaded:.3f} without"
    difference = figures["largest_difference"][METRIC]
    return {"retrieval HR": f"{text}; runs of one seed differ by at most {difference:.4f}"}
