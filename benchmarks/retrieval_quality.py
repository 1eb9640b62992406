"""Compares HSTU retrieval on MovieLens 100K with simpler models, and with and without the stage.

A user's last item tests, and all others train, for a number of steps that was chosen on the second-last item
without training on it. All items are ranked, also those that the user has seen. HSTU trains with its gin file
on two ranks, and the control is a SASRec. Needs a folder with `u.data` and `u.user`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Record, run_torchrun, show_progress
from benchmarks.markdown import make_table
from benchmarks.movielens_equivalence import BALANCED, prepare
from benchmarks.sasrec import SASRecConfig, find_metrics, train_sasrec
from commons.datasets import UserSequences

MODULE = "hstu.training.pretrain_gr_retrieval"
CONFIG = "hstu/training/configs/movielens_100k_retrieval.gin"
SEEDS, RANKS = (1, 2, 3, 4, 5), 2
ARMS = {"HSTU, balanced": (BALANCED,), "HSTU, as loaded": ()}
CONTROL = "SASRec"
METRICS = ("HR@10", "NDCG@10")


def measure(folder: str) -> Record:
    """Returns both metrics of each model on the test items, and of trained models for each seed."""
    with TemporaryDirectory() as made:
        dataset = Path(made) / "ml-100k"
        prepare(folder, dataset)
        sequences = UserSequences.open(dataset, "ml-100k")
        histories = np.split(sequences.items.astype(np.int64), sequences.offsets[1:-1])
        models: dict[str, list[Record]] = {
            name: [_test(score([history[:-1] for history in histories], _count_items(histories)), histories)]
            for name, score in SIMPLE.items()
        }
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            models[CONTROL] = list(pool.map(partial(_control, histories), SEEDS))
        models |= {arm: [] for arm in ARMS}
        for seed in show_progress(SEEDS, "seeds"):
            for arm, settings in ARMS.items():
                run = Path(made) / f"{seed}-{len(settings)}"
                models[arm].append(_train(dataset, run, seed, settings))
    return {"users": len(histories), "models": models}


def _train(dataset: Path, run: Path, seed: int, settings: Sequence[str]) -> Record:
    """Trains HSTU on all but the last items, and returns what its last step reaches on them."""
    bindings = [
        f"DatasetArgs.dataset_path='{dataset}'",
        "DatasetArgs.num_held_out=1",
        f"TrainerArgs.seed={seed}",
        "TrainerArgs.best_metric=''",
        "TrainerArgs.eval_interval=1000000",  # longer than the run, so that only its end is evaluated
        f"TrainerArgs.log_dir='{run}'",
        *settings,
    ]
    run_torchrun(RANKS, MODULE, "--gin-config-file", CONFIG, "--gin-bindings", *bindings)
    *_, last = (run / "train.jsonl").read_text().splitlines()
    return {name: json.loads(last)[name] for name in METRICS}


def _control(histories: Sequence[np.ndarray], seed: int) -> Record:
    known = [history[:-1] for history in histories]
    return _test(train_sasrec(known, _count_items(histories), seed, SASRecConfig()), histories)


def _test(scores: np.ndarray, histories: Sequence[np.ndarray]) -> Record:
    """Returns both metrics of scores `[users, num_items]` on the last items."""
    return dict(zip(METRICS, find_metrics(scores, [int(history[-1]) for history in histories]), strict=True))


def count_popularity(histories: Sequence[np.ndarray], num_items: int) -> np.ndarray:
    """Scores an item by its number of events, `[users, num_items]`."""
    counts = np.bincount(np.concatenate(histories), minlength=num_items)
    return np.tile(counts, (len(histories), 1)).astype(float)


def count_bigrams(histories: Sequence[np.ndarray], num_items: int) -> np.ndarray:
    """Scores an item by how often it followed the user's last one, then by popularity."""
    follows = np.zeros((num_items, num_items))
    for history in histories:
        np.add.at(follows, (history[:-1], history[1:]), 1)
    return follows[[history[-1] for history in histories]] + count_popularity(histories, num_items) / 1e6


SIMPLE: dict[str, Callable[[Sequence[np.ndarray], int], np.ndarray]] = {
    "popularity": count_popularity,
    "bigram counts": count_bigrams,
}


def _count_items(histories: Sequence[np.ndarray]) -> int:
    """Returns the number of items, including 0 for none."""
    return 1 + max(int(history.max()) for history in histories)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker: means over seeds, and their standard errors."""
    rows = [
        {"model": name, "seeds": len(runs) if len(runs) > 1 else "–"}
        | {metric: _mean([run[metric] for run in runs]) for metric in METRICS}
        for name, runs in figures["models"].items()
    ]
    columns = {"model": "{model}", "seeds": "{seeds}"}
    return {"retrieval quality": make_table(rows, columns | {name: f"{{{name}}}" for name in METRICS})}


def _mean(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"
