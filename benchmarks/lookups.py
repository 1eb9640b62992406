"""Step time, bytes and unique ids of each partitioner where embedding lookups take a share of the step.

All arms alternate, on two ranks and on the same batches.
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
    cases,
    in_turn,
    machine,
    measured,
    milliseconds,
    on_ranks,
    quartiles,
    spread,
)
from benchmarks.lookup_model import FLOPS, ROW_WIDTH, UniqueLookups, ranking_model
from benchmarks.lookup_streams import LENGTHS, NUM_ITEMS, NUM_USERS, STREAMS, batches
from benchmarks.markdown import table
from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from hstu.batch_shuffler import flops_of_rows

RANKS = 2
WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 2, 20, 2
ROWS_OF_TABLES = {"item": NUM_ITEMS, "user_id": NUM_USERS}  # the sharded ones, by feature
AS_LOADED, REFERENCE = "as loaded", "refined"
# By name, the settings of a shuffler.
ARMS: dict[str, Record] = {
    AS_LOADED: {},
    "karmarkar_karp": {"partitioner": "karmarkar_karp"},
    REFERENCE: {"partitioner": "refined"},
    "rebalance": {"partitioner": "rebalance"},
    "rebalance, groups": {"partitioner": "rebalance", "group_feature": "user_id"},
}


def measure() -> Record:
    """Returns the figures of each stream and lengths."""
    streams = on_ranks(RANKS, train)
    return {"ranks": RANKS, "steps": BLOCKS * STEPS_PER_BLOCK, "streams": streams, "machine": machine()}


def train(device: torch.device) -> list[Record]:
    """Trains on a rank: a record for each stream and lengths."""
    torch.manual_seed(0)
    model, lookups = ranking_model()
    sharded, optimizer = shard_model(model, OptimizerArgs("adagrad", 1e-3), device)
    figures = partial(_stream_figures, sharded, lookups, optimizer)
    return measured(cases(lengths=LENGTHS, stream=STREAMS), figures, "streams")


class _Arm:
    """Trains the model, which all arms share, with the shuffler of one."""

    def __init__(
        self, name: str, model: nn.Module, lookups: UniqueLookups, optimizer: Any, loaded: list[HSTUBatch]
    ) -> None:
        self._lookups, self._loaded = lookups, loaded
        self._shuffler = _shuffler_of(name)
        self._pipeline = TrainPipelineFactory.create(
            "none",
            model=model,
            optimizer=optimizer,
            device=torch.device("cpu"),
            batch_shuffler=self._shuffler,
            loss_reduction="sum",
        )
        self._batches = iter(loaded)
        self.step_ms: list[float] = []
        self._counts: list[list[float]] = []  # of each step: unique ids, those of other ranks, bytes sent
        self._imbalance: list[float] = []

    def run(self, steps: int) -> None:
        """Trains some steps."""
        dist.barrier()
        for _ in range(steps):
            self.step_ms.append(milliseconds(partial(self._pipeline.progress, self._batches)))
            report = self._pipeline.report
            self._imbalance.append(report.imbalance_after)
            self._counts.append([*_looked_up(self._lookups), report.bytes_sent])

    def clear(self) -> None:
        """Forgets what was measured so far."""
        for figures in (self.step_ms, self._counts, self._imbalance):
            figures.clear()

    def figures(self) -> Record:
        """Returns times of this rank, and counts of all ranks. Collective; the arm cannot run again."""
        self._pipeline.reset()
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self._counts)
        unique, remote, sent = np.moveaxis(np.array(everyones, dtype=np.float64), 2, 0)  # [ranks, steps] each
        row_bytes = ROW_WIDTH * torch.float32.itemsize
        # All batches again, one by one; the gather is included.
        planning = [_after_barrier(partial(self._shuffler.plan, batch)) for batch in self._loaded]
        return {
            "step_ms": spread(self.step_ms),
            "planning_ms": spread(planning),
            "imbalance": round(float(np.mean(self._imbalance)), 4),
            "unique_ids": round(float(unique.mean()), 1),
            "unique_ids_of_most": round(float(unique.max(0).mean()), 1),
            # Forward brings the rows that other ranks hold, and backward returns a gradient for each.
            "embedding_megabytes": round(2 * row_bytes * float(remote.mean()) / 1e6, 3),
            "sample_kilobytes_sent": round(float(sent.mean()) / 1e3, 2),
        }


def _shuffler_of(arm: str) -> BatchShuffler:
    if arm == AS_LOADED:
        workloads = partial(flops_of_rows, FLOPS)
        return BatchShufflerFactory.create("identity", get_workloads=workloads, unit="FLOPs")
    return BatchShufflerFactory.create("hstu", flops=FLOPS, **ARMS[arm])


def _after_barrier(call: Any) -> float:
    dist.barrier()
    return milliseconds(call)


def _looked_up(lookups: UniqueLookups) -> tuple[int, int]:
    """Returns the unique ids of this rank's last step, and how many of their rows another rank holds."""
    unique = remote = 0
    for name, num_rows in ROWS_OF_TABLES.items():
        ids, rows_per_rank = lookups.unique_ids[name], -(-num_rows // dist.get_world_size())
        unique += len(ids)
        remote += int((ids // rows_per_rank != dist.get_rank()).sum())
    return unique, remote


def _look_up(lookups: UniqueLookups, batch: HSTUBatch) -> None:
    """Runs the lookups of a batch alone, with their backward."""
    embedded = lookups(batch.features)
    sum(of_feature.values().sum() for of_feature in embedded.values()).backward()


def _ids_per_rank(loaded: list[HSTUBatch]) -> float:
    """Returns the ids of a step that a rank has to look up, of the mean step and rank. Collective."""
    num_ids = [sum(len(batch.features[name].values()) for name in ROWS_OF_TABLES) for batch in loaded]
    of_ranks = torch.tensor(float(np.mean(num_ids)))
    dist.all_reduce(of_ranks)
    return round(float(of_ranks) / dist.get_world_size(), 1)


def _stream_figures(
    model: nn.Module, lookups: UniqueLookups, optimizer: Any, lengths: str, stream: str
) -> Record:
    steps = WARM_UP_STEPS + BLOCKS * STEPS_PER_BLOCK
    loaded = batches(STREAMS[stream], lengths, steps, dist.get_rank(), dist.get_world_size())
    arms = {name: _Arm(name, model, lookups, optimizer, loaded) for name in ARMS}
    for arm in arms.values():
        arm.run(WARM_UP_STEPS)
        arm.clear()
    counted, lookups_ms = loaded[WARM_UP_STEPS:], []

    def look_up(steps: int) -> None:
        for batch in counted[len(lookups_ms) :][:steps]:
            lookups_ms.append(_after_barrier(partial(_look_up, lookups, batch)))

    for run in in_turn([*(arm.run for arm in arms.values()), look_up], BLOCKS):
        run(STEPS_PER_BLOCK)
    of_blocks = {
        name: np.array(arm.step_ms).reshape(BLOCKS, STEPS_PER_BLOCK).sum(1) for name, arm in arms.items()
    }
    return {
        "ids": _ids_per_rank(counted),
        "lookups_ms": spread(lookups_ms),
        "arms": {
            name: arm.figures()
            | {"ratio_to_reference": quartiles(of_blocks[name] / of_blocks[REFERENCE], digits=4)}
            for name, arm in arms.items()
        },
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    streams, arms = [], []
    for record in figures["streams"]:
        as_loaded = record["arms"][AS_LOADED]
        lookups, step = record["lookups_ms"]["median"], as_loaded["step_ms"]["median"]
        unique = as_loaded["unique_ids"] / record["ids"]
        streams.append(record | {"as_loaded": as_loaded, "unique": unique, "share": lookups / step})
        for name, arm in record["arms"].items():
            relative = {key: arm[key] / as_loaded[key] for key in ("unique_ids", "unique_ids_of_most")}
            lengths = record["lengths"].partition(" ")[0].partition("(")[0]
            arms.append(
                arm | {"stream": f"{record['stream']}, {lengths}", "name": name, "relative": relative}
            )
    of_streams = table(
        streams,
        {
            "stream": "{stream}",
            "lengths": "{lengths}",
            "ids per rank": "{ids:,.0f}",
            "unique": "{unique:.2f}",
            "embedding MB": "{as_loaded[embedding_megabytes]:.1f}",
            "lookups alone, ms": "{lookups_ms[median]:.0f} ({share:.0%})",
        },
    )
    of_arms = table(
        arms,
        {
            "stream": "{stream}",
            "partitioner": "{name}",
            "step, ms": "{step_ms[median]:.0f} ({step_ms[min]:.0f} to {step_ms[max]:.0f})",
            f"÷ {REFERENCE}": lambda arm: "{median:.2f} ({lower:.2f} to {upper:.2f})".format(
                **arm["ratio_to_reference"]
            ),
            "imbalance": "{imbalance:.3f}",
            "unique ids, mean / most": "{relative[unique_ids]:.2f} / {relative[unique_ids_of_most]:.2f}",
            "embedding MB": "{embedding_megabytes:.1f}",
            "sample kB": "{sample_kilobytes_sent:.0f}",
            "planning, ms": "{planning_ms[median]:.1f}",
        },
    )
    text = (
        "{cores} cores ({cpu}), torch {torch}, gloo, one thread per rank; "
        "medians and extremes of {steps} steps."
    )
    on = text.format(steps=figures["steps"], **figures["machine"])
    return {"lookups streams": of_streams, "lookups arms": of_arms, "lookups machine": on}
