"""Cost and traffic of the shuffle stage in training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.demo.training import make_arm, parse_config
from benchmarks.harness import Arm, Record, run_on_ranks, summarize, time_call, time_ms, train_in_turn
from benchmarks.markdown import Cell, make_table
from commons.distributed import ShufflerSettings
from commons.distributed.placement import warm_up

# Settings of a shuffler, by name. The first sends every sample to every rank.
ARMS = {
    "all_gather, Karmarkar–Karp": {"balance_exchange": "all_gather", "balance_partitioner": "karmarkar_karp"},
    "all_to_all, Karmarkar–Karp": {"balance_partitioner": "karmarkar_karp"},
    "all_to_all, rebalance": {},
    "all_to_all, refined": {"balance_partitioner": "refined"},
}
RANKS, WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 2, 3, 10, 4


def measure() -> Record:
    """Returns the figures of training."""
    warm_up(ShufflerSettings())
    return {"training": run_on_ranks(RANKS, train)}


class _TimedArm(Arm):
    """An arm that also times each step, and the handing of a batch to the planning thread, without loading.

    Barriers keep waits for slower ranks out of the stage's times.
    """

    def __init__(self, arm: Arm) -> None:
        super().__init__(arm.pipeline, self._load(arm._batches))
        stage = arm.pipeline._stage
        self._next_batch, self._exchange = stage.next_batch, stage.exchange
        stage.next_batch, stage.exchange = self._time_next_batch, self._exchange_together
        self._step_ms: list[float] = []
        self._handing_ms: list[float] = []
        self._loading_ms = 0.0

    def _load(self, batches: Iterator[Any]) -> Iterator[Any]:
        start = time.perf_counter()
        for batch in batches:
            self._loading_ms += (time.perf_counter() - start) * 1e3
            yield batch
            start = time.perf_counter()

    def _time_next_batch(self, loader: Iterator[Any]) -> Any:
        dist.barrier()
        self._loading_ms = 0.0
        batch, taken = time_call(partial(self._next_batch, loader))
        self._handing_ms.append(taken - self._loading_ms)
        return batch

    def _exchange_together(self, batch: Any) -> Any:
        dist.barrier()
        return self._exchange(batch)

    def run(self, steps: int, timed: bool = True) -> None:
        """Trains for `steps` steps. If they are not timed, discards their and all earlier measurements."""
        for _ in range(steps):
            self._step_ms.append(time_ms(partial(self.pipeline.progress, self._batches)))
            self.reports.append(self.pipeline.report)
        if not timed:
            for so_far in (self._handing_ms, self._step_ms, self.reports):
                so_far.clear()

    def figures(self) -> Record:
        """Returns medians, minima, and maxima. A share is a fraction of the same step's time."""
        exchange_ms = [report.exchange_seconds * 1e3 for report in self.reports]
        exposed_ms = np.add(self._handing_ms, exchange_ms)
        after = [report.loads_after for report in self.reports]
        return {
            "step_ms": summarize(self._step_ms),
            "exchange_ms": summarize(exchange_ms),
            "exposed_share_of_step": summarize((exposed_ms / self._step_ms).tolist(), 5),
            "kilobytes_sent": summarize([report.bytes_sent / 1e3 for report in self.reports]),
            "imbalance": round(sum(each.max() for each in after) / sum(each.mean() for each in after), 4),
        }


def train(device: torch.device) -> Record:
    """Trains the demo's model on this rank, alternating between the arms."""
    make_task = parse_config("hstu")
    arms = {
        name: _TimedArm(make_arm(make_task, {"enable_balanced_shuffler": True, **settings}, device))
        for name, settings in ARMS.items()
    }
    train_in_turn(arms.values(), BLOCKS, "train", STEPS_PER_BLOCK, WARM_UP_STEPS)
    return {"arms": {name: arm.figures() for name, arm in arms.items()}}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    arms = figures["training"]["arms"]
    training = {name: arm | {"name": name, "exposed_ms": _find_exposed(arm)} for name, arm in arms.items()}
    columns: dict[str, Cell] = {
        "exchange, partitioner": "{name}",
        "imbalance": "{imbalance:.3f}",
        "step, ms": "{step_ms[median]:.0f}",
        "exposed, ms": "{exposed_ms:.1f}",
        "exchange, ms": "{exchange_ms[median]:.2f}",
        "kB sent": "{kilobytes_sent[median]:.0f}",
    }
    return {
        "shuffle training": make_table(training.values(), columns),
        "readme cost": (
            "{exposed_ms:.1f} ms of a CPU step of {step_ms[median]:.0f} ms, where each sends "
            "{kilobytes_sent[median]:.0f} kB"
        ).format(**training["all_to_all, rebalance"]),
    }


def _find_exposed(arm: Record) -> float:
    return arm["exposed_share_of_step"]["median"] * arm["step_ms"]["median"]
