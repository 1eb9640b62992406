"""Trains SID-GR on Amazon data with and without the shuffler, and compares it with the most popular items.

Trains on two ranks with `sid_amazon.gin`, for five splits by user, 80% for training and 10% for testing.
Needs a folder with `interactions.jsonl` and `item_to_sid.json`. Measures HitRate@10 over all items on the
test users, and that of the most frequent training items.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import gin
import polars as pl
import torch

from benchmarks.harness import Record, machine, run_on_ranks, show_progress
from commons.datasets.sid_preprocess import convert
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, train
from sid_gr.training.sid_gr_task import sid_gr_task

CONFIG = "sid_gr/training/configs/sid_amazon.gin"
SEEDS, RANKS, K = (1, 2, 3, 4, 5), 2, 10
METRIC, POPULAR = f"HitRate@{K}", "most_popular"
# By name, settings beside those of the file.
ARMS = {
    "configured": (),
    "without_dropout": (
        "NetworkArgs.hidden_dropout = 0.0",
        "TrainerArgs.enable_balanced_shuffler = False",
    ),
    "without_dropout_balanced": (
        "NetworkArgs.hidden_dropout = 0.0",
        "TrainerArgs.enable_balanced_shuffler = True",
    ),
}


def measure(folder: str) -> Record:
    """Returns the metrics of each split, and their means."""
    raw, splits = Path(folder), []
    for seed in show_progress(SEEDS, "splits"):
        with TemporaryDirectory() as made:
            prepared = Path(made)
            convert(raw / "interactions.jsonl", prepared, seed, (80, 10, 10))
            (prepared / "item_to_sid.json").write_bytes((raw / "item_to_sid.json").read_bytes())
            arms = {arm: run_on_ranks(RANKS, train_arm, prepared, str(seed), *ARMS[arm]) for arm in ARMS}
            splits.append({"split_seed": seed, POPULAR: _score_popular(prepared), **arms})
    means = {f"mean_{name}": statistics.mean(split[name] for split in splits) for name in (POPULAR, *ARMS)}
    differences = [abs(split["without_dropout"] - split["without_dropout_balanced"]) for split in splits]
    figures = {**means, "largest_difference_balanced": max(differences)}
    return {**figures, "splits": splits, "machine": machine()}


def _score_popular(prepared: Path) -> float:
    """Returns HitRate@K of the K most frequent items in training; ties go to smaller ids."""
    train_items, test_items = (
        pl.read_parquet(prepared / f"{part}.parquet")["sequence_data"] for part in ("training", "testing")
    )
    counts = train_items.explode().value_counts().sort("count", "sequence_data", descending=[True, False])
    return float(test_items.list.last().is_in(counts["sequence_data"][:K].to_list()).mean())


def train_arm(device: torch.device, prepared: str, seed: str, *overrides: str) -> float:
    """Trains on a rank; returns the metric of the last evaluation."""
    paths = {
        "sequence_features_training_data_path": "training.parquet",
        "sequence_features_testing_data_path": "testing.parquet",
        "item_to_sid_mapping_path": "item_to_sid.json",
    }
    bindings = [f"DatasetArgs.{name} = '{prepared}/{file}'" for name, file in paths.items()]
    bindings += [f"TrainerArgs.seed = {seed}", f"TrainerArgs.log_dir = '{prepared}/logs'", *overrides]
    gin.parse_config_files_and_bindings([CONFIG], bindings)
    args = from_gin(TrainerArgs)
    return train(sid_gr_task(args, device), args, from_gin(OptimizerArgs), device)[-1][METRIC]


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    text = (
        "{mean_configured:.3f}, {mean_most_popular:.3f} for the 10 most popular; without dropout "
        "{mean_without_dropout_balanced:.3f} with the stage, {mean_without_dropout:.3f} without"
    )
    return {"amazon HitRate": text.format(**figures)}
