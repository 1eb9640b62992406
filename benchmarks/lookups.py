"""Measures step times and unique ids of each partitioner when lookups take a share of the step.

All arms alternate on the same batches, on two ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import (
    Record,
    find_quartiles,
    gather_from_ranks,
    list_cases,
    machine,
    measure_cases,
    run_on_ranks,
    summarize,
    take_turns,
    time_ms,
)
from benchmarks.lookup_model import FLOPS, UniqueLookups, make_ranking_model
from benchmarks.lookup_streams import LENGTHS, STREAMS, draw_batches
from benchmarks.markdown import make_table, pivot
from commons.datasets import HSTUBatch
from commons.distributed import BatchShufflerFactory
from commons.extensions.sample_groups import SampleGroups
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from hstu.batch_shuffler import flops_of_rows

RANKS = 2
WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 2, 20, 2
LOOKED_UP = ("item", "user_id")
AS_LOADED, REFERENCE, WITH_GROUPS = "as loaded", "refined", "rebalance, groups"
# Settings of a shuffler, by name.
ARMS: dict[str, Record] = {
    AS_LOADED: {},
    REFERENCE: {"partitioner": "refined"},
    "rebalance": {"partitioner": "rebalance"},
    WITH_GROUPS: {"partitioner": "rebalance"},
}


def measure() -> Record:
    """Returns a record for each stream and lengths."""
    return {"streams": run_on_ranks(RANKS, train), "machine": machine()}


def train(device: torch.device) -> list[Record]:
    """Trains on this rank, and returns a record for each stream and lengths."""
    torch.manual_seed(0)
    model, lookups = make_ranking_model()
    sharded, optimizer = shard_model(model, OptimizerArgs("adagrad", 1e-3), device)
    figures = partial(_measure_stream, sharded, lookups, optimizer)
    return measure_cases(list_cases(lengths=LENGTHS, stream=STREAMS), figures, "streams")


class _Arm:
    """The shuffler and the pipeline of one arm. All arms train the same model."""

    def __init__(
        self, name: str, model: nn.Module, lookups: UniqueLookups, optimizer: Any, loaded: list[HSTUBatch]
    ) -> None:
        self._lookups = lookups
        if name == AS_LOADED:
            workloads = partial(flops_of_rows, FLOPS)
            shuffler = BatchShufflerFactory.create("identity", get_workloads=workloads, unit="FLOPs")
        else:
            extensions = [SampleGroups("user_id")] if name == WITH_GROUPS else []
            shuffler = BatchShufflerFactory.create("hstu", flops=FLOPS, extensions=extensions, **ARMS[name])
        self._pipeline = TrainPipelineFactory.create(
            "none",
            model=model,
            optimizer=optimizer,
            device=torch.device("cpu"),
            batch_shuffler=shuffler,
            loss_reduction="sum",
        )
        self._batches = iter(loaded)
        self.step_ms: list[float] = []
        self._unique_ids: list[int] = []  # number in each step

    def run(self, steps: int) -> None:
        """Trains for `steps` steps, after a barrier."""
        dist.barrier()
        for _ in range(steps):
            self.step_ms.append(time_ms(partial(self._pipeline.progress, self._batches)))
            self._unique_ids.append(sum(map(len, self._lookups.unique_ids.values())))

    def figures(self) -> Record:
        """Returns this rank's times and all ranks' counts. Collective. The arm cannot run again."""
        self._pipeline.reset()
        unique = np.array(gather_from_ranks(self._unique_ids))[:, WARM_UP_STEPS:]  # [ranks, steps]
        return {
            "step_ms": summarize(self.step_ms[WARM_UP_STEPS:]),
            "unique_ids": round(float(unique.mean()), 1),
            "unique_ids_of_most": round(float(unique.max(0).mean()), 1),
        }


def _look_up(lookups: UniqueLookups, batch: HSTUBatch) -> None:
    """Runs only the lookups of a batch, forward and backward."""
    sum(rows.values().sum() for rows in lookups(batch.features).values()).backward()


def _measure_stream(
    model: nn.Module, lookups: UniqueLookups, optimizer: Any, lengths: str, stream: str
) -> Record:
    steps = WARM_UP_STEPS + BLOCKS * STEPS_PER_BLOCK
    loaded = draw_batches(STREAMS[stream], lengths, steps, dist.get_rank(), dist.get_world_size())
    arms = {name: _Arm(name, model, lookups, optimizer, loaded) for name in ARMS}
    for arm in arms.values():
        arm.run(WARM_UP_STEPS)
    counted, lookups_ms = loaded[WARM_UP_STEPS:], []

    def look_up(steps: int) -> None:
        for batch in counted[len(lookups_ms) :][:steps]:
            dist.barrier()
            lookups_ms.append(time_ms(partial(_look_up, lookups, batch)))

    for run in take_turns([*(arm.run for arm in arms.values()), look_up], BLOCKS):
        run(STEPS_PER_BLOCK)
    blocks = {
        name: np.reshape(arm.step_ms[WARM_UP_STEPS:], (BLOCKS, -1)).sum(1) for name, arm in arms.items()
    }
    num_ids = [sum(len(batch.features[name].values()) for name in LOOKED_UP) for batch in counted]
    return {
        "ids": round(float(np.mean(gather_from_ranks(num_ids))), 1),
        "lookups_ms": summarize(lookups_ms),
        "arms": {
            name: arm.figures()
            | {"ratio_to_reference": find_quartiles(blocks[name] / blocks[REFERENCE], digits=4)}
            for name, arm in arms.items()
        },
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    streams, arms = [], []
    for record in figures["streams"]:
        as_loaded = record["arms"][AS_LOADED]
        lookups, step = record["lookups_ms"]["median"], as_loaded["step_ms"]["median"]
        unique = as_loaded["unique_ids"] / record["ids"]
        streams.append(record | {"as_loaded": as_loaded, "unique": unique, "share": lookups / step})
        for name in ARMS:
            arm = record["arms"][name]
            relative = {key: arm[key] / as_loaded[key] for key in ("unique_ids", "unique_ids_of_most")}
            stream = f"{record['stream']}, {record['lengths'].partition(' ')[0].partition('(')[0]}"
            arms.append(arm | {"stream": stream, "name": name, "relative": relative})
    columns = {
        "stream": "{stream}",
        "lengths": "{lengths}",
        "ids per rank": "{ids:,.0f}",
        "unique": "{unique:.2f}",
        "lookups alone, ms": "{lookups_ms[median]:.0f} ({share:.0%})",
    }
    ratio = "ratio_to_reference"
    cell = (
        f"{{{ratio}[median]:.2f}} ({{{ratio}[lower]:.2f}}–{{{ratio}[upper]:.2f}}), "
        "{relative[unique_ids]:.2f} / {relative[unique_ids_of_most]:.2f}"
    )
    return {
        "lookups streams": make_table(streams, columns),
        "lookups arms": pivot(arms, {"stream": "{stream}"}, "{name}", cell),
    }
