"""Trains SID-GR on Amazon data with and without the shuffler, and compares it with the most popular items.

Trains on two ranks with `sid_amazon.gin`, for five splits by user, 80% for training and 10% for testing.
Needs a folder with `interactions.jsonl` and `item_to_sid.json`. Measures HitRate@10 over all items on the
test users, that of the most frequent training items, and the fraction of the exhaustive top 10 that beam
search finds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import gin
import polars as pl
import torch
import torch.distributed as dist

from benchmarks.harness import Record, machine, on_ranks, progress
from commons.datasets import SIDBatch
from commons.datasets.sid_preprocess import convert
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, train
from sid_gr.models import SIDGR
from sid_gr.training.sid_gr_task import sid_gr_task

CONFIG = "sid_gr/training/configs/sid_amazon.gin"
SEEDS, RANKS, K = (1, 2, 3, 4, 5), 2, 10
METRIC = f"HitRate@{K}"
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
# Samples per rank to compare with an exhaustive search, which is slow.
COMPARED_SAMPLES = 50


def measure(folder: str) -> Record:
    """Returns the metrics of each split, and their means."""
    raw, splits = Path(folder), []
    for seed in progress(SEEDS, "splits"):
        with TemporaryDirectory() as made:
            prepared = Path(made)
            convert(raw / "interactions.jsonl", prepared, seed, (80, 10, 10))
            (prepared / "item_to_sid.json").write_bytes((raw / "item_to_sid.json").read_bytes())
            arms = {arm: on_ranks(RANKS, train_arm, prepared, str(seed), *ARMS[arm]) for arm in ARMS}
            figures = {arm: of_arm[METRIC] for arm, of_arm in arms.items()}
            figures["beam_recall"] = arms["configured"]["beam_recall"]
            splits.append({"split_seed": seed, "most_popular": _hit_rate_of_popular(prepared), **figures})
    means = {name: statistics.mean(split[name] for split in splits) for name in list(splits[0])[1:]}
    differences = [abs(split["without_dropout"] - split["without_dropout_balanced"]) for split in splits]
    return {
        "ranks": RANKS,
        "config": CONFIG,
        **{f"mean_{name}": mean for name, mean in means.items()},
        "configured_over_most_popular": means["configured"] / means["most_popular"],
        "largest_difference_balanced": max(differences),
        "splits": splits,
        "machine": machine(),
    }


def _hit_rate_of_popular(prepared: Path) -> float:
    """Returns HitRate@K of the K most frequent items in training; ties go to smaller ids."""
    train_items, test_items = (
        pl.read_parquet(prepared / f"{part}.parquet")["sequence_data"] for part in ("training", "testing")
    )
    counts = train_items.explode().value_counts().sort("count", "sequence_data", descending=[True, False])
    return float(test_items.list.last().is_in(counts["sequence_data"][:K].to_list()).mean())


def train_arm(device: torch.device, prepared: str, seed: str, *overrides: str) -> dict[str, float]:
    """Trains on a rank; returns the last evaluation and, with the file's settings, the beam's recall."""
    paths = {
        "sequence_features_training_data_path": "training.parquet",
        "sequence_features_testing_data_path": "testing.parquet",
        "item_to_sid_mapping_path": "item_to_sid.json",
    }
    bindings = [f"DatasetArgs.{name} = '{prepared}/{file}'" for name, file in paths.items()]
    bindings += [f"TrainerArgs.seed = {seed}", f"TrainerArgs.log_dir = '{prepared}/logs'", *overrides]
    gin.parse_config_files_and_bindings([CONFIG], bindings)
    args = from_gin(TrainerArgs)
    task = sid_gr_task(args, device)
    figures = train(task, args, from_gin(OptimizerArgs), device)[-1]
    if not overrides:
        batches = (batch.to(device) for batch in task.eval_dataset)
        found_and_samples = torch.tensor(_found(task.model, batches))
        dist.all_reduce(found_and_samples)
        figures["beam_recall"] = float(found_and_samples[0] / found_and_samples[1])
    return figures


@torch.no_grad()
def _found(model: SIDGR, batches: Iterator[SIDBatch]) -> list[float]:
    """Returns the beam's recall of the exhaustive top K, summed over the first samples, and their number.

    A beam is exhaustive if it is as wide as the number of prefixes before the last code.
    """
    model.eval()
    narrow = model.config
    num_prefixes = max(model.tree.num_prefixes(depth) for depth in range(len(model.tree.codebook_sizes) - 1))
    total = count = 0.0
    samples = (batch.index_select([row]) for batch in batches for row in range(batch.num_samples))
    for sample in islice(samples, COMPARED_SAMPLES):
        found = []
        for config in (narrow, replace(narrow, top_k=num_prefixes)):
            model.config = config
            found.append(set(model(sample)[1].items[0, :K].tolist()))
        total += len(found[0] & found[1]) / K
        count += 1
    model.config = narrow
    return [total, count]
