"""Compares HSTU retrieval on MovieLens 100K with simpler models, and with and without the stage.

A user's last item tests, the second-last validates, and the rest trains. All items are ranked, also those
that the user has seen. The best checkpoint by NDCG@10 on the validation items is tested once. HSTU trains
with its gin file on two ranks, and the control is a SASRec. Needs a folder with `u.data` and `u.user`.
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
            name: [_name(find_metrics(score(histories), [int(history[-1]) for history in histories]))]
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
    """Trains HSTU, and returns what the best checkpoint reaches on the test items."""
    bindings = [f"DatasetArgs.dataset_path='{dataset}'", f"TrainerArgs.seed={seed}", *settings]
    of_training = [f"TrainerArgs.log_dir='{run}/train'", f"TrainerArgs.ckpt_save_dir='{run}'"]
    of_test = [f"TrainerArgs.log_dir='{run}/test'"]
    command = [MODULE, "--gin-config-file", CONFIG]
    run_torchrun(RANKS, *command, "--gin-bindings", *bindings, *of_training)
    run_torchrun(RANKS, *command, "--evaluate", run / "best", "--gin-bindings", *bindings, *of_test)
    *_, last = (run / "test" / "train.jsonl").read_text().splitlines()
    return {name: json.loads(last)[name] for name in METRICS}


def _control(histories: Sequence[np.ndarray], seed: int) -> Record:
    scores = train_sasrec(histories, seed, SASRecConfig())
    return _name(find_metrics(scores, [int(history[-1]) for history in histories]))


def count_popularity(histories: Sequence[np.ndarray]) -> np.ndarray:
    """Scores an item by its number of events in training, `[users, num_items]`."""
    counts = np.bincount(np.concatenate([history[:-2] for history in histories]), minlength=_most(histories))
    return np.tile(counts, (len(histories), 1)).astype(float)


def count_bigrams(histories: Sequence[np.ndarray]) -> np.ndarray:
    """Scores an item by how often it followed the user's last known item in training, then by popularity."""
    follows = np.zeros((_most(histories), _most(histories)))
    for history in histories:
        np.add.at(follows, (history[:-3], history[1:-2]), 1)
    return follows[[history[-2] for history in histories]] + count_popularity(histories) / 1e6


SIMPLE: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "popularity": count_popularity,
    "bigram counts": count_bigrams,
}


def _most(histories: Sequence[np.ndarray]) -> int:
    return 1 + max(int(history.max()) for history in histories)


def _name(values: Sequence[float]) -> Record:
    return dict(zip(METRICS, values, strict=True))


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
