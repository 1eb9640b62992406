"""Trains SID-GR on Amazon data with and without the shuffler, and compares it with the most popular items.

Trains on two ranks with `sid_amazon.gin`, for five splits by user, 80% for training and 10% for testing:

    python -m benchmarks.amazon_retrieval FOLDER_WITH_interactions.jsonl_AND_item_to_sid.json

Prints HitRate@10 over all items on the test users, that of the most frequent training items, and the
fraction of the exhaustive top 10 that beam search finds.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gin
import polars as pl
import torch
import torch.distributed as dist

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.torchrun import torchrun
from commons.datasets import SIDBatch
from commons.datasets.sid_preprocess import convert
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, rank_process, run_rank, train
from sid_gr.models import SIDGR
from sid_gr.training.sid_gr_task import sid_gr_task

RESULT = Path(__file__).parent / "results" / "amazon_retrieval.json"
CONFIG = "sid_gr/training/configs/sid_amazon.gin"
SEEDS = (1, 2, 3, 4, 5)
RANKS = 2
SHUFFLER = "TrainerArgs.enable_balanced_shuffler"
K = 10
METRIC = f"HitRate@{K}"
# Samples per rank to compare with an exhaustive search, which is slow.
COMPARED_SAMPLES = 50


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    raw: Path = parse_arguments(__doc__, folder={"type": Path}).folder
    rows = []
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            prepared = Path(folder)
            convert(raw / "interactions.jsonl", prepared, seed, (80, 10, 10))
            (prepared / "item_to_sid.json").write_bytes((raw / "item_to_sid.json").read_bytes())
            configured = _run(prepared, seed)
            as_loaded, balanced = (
                _run(prepared, seed, ["NetworkArgs.hidden_dropout = 0.0", f"{SHUFFLER} = {enable}"])
                for enable in (False, True)
            )
            popular = _hit_rate_of_popular(prepared)
        rows.append(
            {
                "split_seed": seed,
                "most_popular": popular,
                "configured": configured[METRIC],
                "beam_recall": configured["beam_recall"],
                "without_dropout": as_loaded[METRIC],
                "without_dropout_balanced": balanced[METRIC],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    figures = {"ranks": RANKS, "config": CONFIG, **_summary(rows), "splits": rows, "machine": machine()}
    print(json.dumps(_summary(rows), indent=1))
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    means = {name: statistics.mean(row[name] for row in rows) for name in rows[0] if name != "split_seed"}
    differences = [abs(row["without_dropout"] - row["without_dropout_balanced"]) for row in rows]
    return {
        **{f"mean_{name}": mean for name, mean in means.items()},
        "configured_over_most_popular": means["configured"] / means["most_popular"],
        "largest_difference_balanced": max(differences),
    }


def _hit_rate_of_popular(prepared: Path) -> float:
    """Returns HitRate@K of the K most frequent items in training; ties go to smaller ids."""
    train_items, test_items = (
        pl.read_parquet(prepared / f"{part}.parquet")["sequence_data"] for part in ("training", "testing")
    )
    counts = train_items.explode().value_counts().sort("count", "sequence_data", descending=[True, False])
    return float(test_items.list.last().is_in(counts["sequence_data"][:K].to_list()).mean())


def _run(prepared: Path, seed: int, bindings: Sequence[str] = ()) -> dict[str, float]:
    """Runs one training in new processes and returns its last evaluation and the beam's recall."""
    result = prepared / "result.json"
    torchrun(RANKS, "benchmarks.amazon_retrieval", prepared, str(seed), result, *bindings)
    return json.loads(result.read_text())


def run_on_rank() -> None:
    """Trains; rank 0 writes the figures."""
    prepared, seed, result, *overrides = sys.argv[1:]
    paths = {
        "sequence_features_training_data_path": "training.parquet",
        "sequence_features_testing_data_path": "testing.parquet",
        "item_to_sid_mapping_path": "item_to_sid.json",
    }
    bindings = [f"DatasetArgs.{name} = '{prepared}/{file}'" for name, file in paths.items()]
    bindings += [f"TrainerArgs.seed = {seed}", f"TrainerArgs.log_dir = '{prepared}/logs'", *overrides]
    gin.parse_config_files_and_bindings([CONFIG], bindings)
    args = from_gin(TrainerArgs)
    with rank_process() as device:
        task = sid_gr_task(args, device)
        figures = train(task, args, from_gin(OptimizerArgs), device)[-1]
        if not overrides:
            batches = (batch.to(device) for batch in task.eval_dataset)
            found_and_samples = torch.tensor(_found(task.model, batches))
            dist.all_reduce(found_and_samples)
            figures["beam_recall"] = float(found_and_samples[0] / found_and_samples[1])
        if dist.get_rank() == 0:
            Path(result).write_text(json.dumps(figures))


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


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(run_on_rank)
    else:
        main()
