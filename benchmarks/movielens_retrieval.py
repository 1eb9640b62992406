"""Trains HSTU retrieval on MovieLens 100K with and without the shuffler, and compares popular items.

Runs the entry point on two ranks for three seeds, without dropout. Needs a folder with `u.data` and `u.user`.
Measures HR@10 and NDCG@10 over all items on each user's last item, and those of the items ranked by frequency
in training.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Record, machine
from benchmarks.movielens_equivalence import BALANCED, SEEDS, prepare, run_trainings
from commons.datasets import UserSequences, UserSequenceSource

CONFIG = "hstu/training/configs/movielens_100k_retrieval.gin"
K = 10
METRICS = (f"HR@{K}", f"NDCG@{K}")
ARMS = {"as_loaded": (), "balanced": (BALANCED,)}


def measure(folder: str) -> Record:
    """Returns the metrics of all evaluations, means of the last ones, and by how much the arms differ."""
    rows: list[Record] = []
    with TemporaryDirectory() as made:
        prepared = prepare(Path(folder), Path(made))
        popular = _score_popular(prepared)
        for seed in SEEDS:
            logs = run_trainings("hstu.training.pretrain_gr_retrieval", CONFIG, ARMS, prepared, seed)
            evaluations = {
                arm: [{name: line[name] for name in METRICS} for line in log if line["kind"] == "eval"]
                for arm, log in logs.items()
            }
            rows.append({"seed": seed, **evaluations})
    last = {arm: {metric: [row[arm][-1][metric] for row in rows] for metric in METRICS} for arm in ARMS}
    return {
        "most_popular": popular,
        "mean": {
            arm: {metric: statistics.mean(values) for metric, values in metrics.items()}
            for arm, metrics in last.items()
        },
        "largest_difference": {
            metric: float(np.abs(np.subtract(*(last[arm][metric] for arm in ARMS))).max())
            for metric in METRICS
        },
        "evaluations": rows,
        "machine": machine(),
    }


def _score_popular(prepared: Path) -> dict[str, float]:
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


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    means, metric = figures["mean"], METRICS[0]
    balanced, as_loaded = (means[arm][metric] for arm in ("balanced", "as_loaded"))
    popular, difference = (figures[name][metric] for name in ("most_popular", "largest_difference"))
    text = f"{balanced:.3f} with the stage, {as_loaded:.3f} without, {popular:.3f} for the {K} most popular"
    return {"retrieval HR": f"{text}; runs of one seed differ by at most {difference:.4f}"}
