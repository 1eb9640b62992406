"""Times what a pipeline's shuffle stage does, on the main thread and beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from commons.pipeline.shuffle_stage import ShuffleStage


class StageClock:
    """Wraps a stage's calls; before each the ranks wait for each other, so that it absorbs no rank skew.

    Attributes:
        milliseconds: of each step "exposed" (main thread in the stage, loading not counted), "exchange",
            "wait" (for the plan); and of each plan "planning", in its thread.
    """

    def __init__(self, stage: ShuffleStage) -> None:
        self.milliseconds: dict[str, list[float]] = {
            name: [] for name in ("exposed", "exchange", "wait", "planning")
        }
        self._stage = stage
        self._next_batch, self._exchange = stage.next_batch, stage.exchange
        shuffler = stage._shuffler
        self._plan_with = shuffler.plan_with
        stage.next_batch = self._timed_next_batch  # type: ignore[method-assign]
        stage.exchange = self._timed_exchange  # type: ignore[method-assign]
        shuffler.plan_with = self._timed_plan  # type: ignore[method-assign]
        self._loading = self._before_exchange = 0.0

    def clear(self) -> None:
        """Forgets what was measured so far."""
        for of_name in self.milliseconds.values():
            of_name.clear()

    def watch(self, loader: Iterator[Any]) -> Iterator[Any]:
        """The loader's batches, the time it takes for them noted."""
        while True:
            start = time.perf_counter()
            batch = next(loader, None)
            self._loading += _milliseconds_since(start)
            if batch is None:
                return
            yield batch

    def _timed_next_batch(self, loader: Iterator[Any]) -> Any:
        dist.barrier()
        self._loading, start = 0.0, time.perf_counter()
        batch = self._next_batch(loader)
        self._before_exchange = _milliseconds_since(start) - self._loading
        return batch

    def _timed_exchange(self, batch: Any) -> Any:
        dist.barrier()
        start = time.perf_counter()
        exchanged = self._exchange(batch)
        exchange = _milliseconds_since(start)
        for name, value in (
            ("exposed", self._before_exchange + exchange),
            ("exchange", exchange),
            ("wait", self._stage._exchanged[-1].plan_wait_seconds * 1e3),
        ):
            self.milliseconds[name].append(value)
        return exchanged

    def _timed_plan(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        plan = self._plan_with(*arguments)
        self.milliseconds["planning"].append(_milliseconds_since(start))
        return plan


class CollectiveCounter:
    """Counts the calls of torch.distributed that communicate, while it is entered."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> CollectiveCounter:
        for name in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "all_gather_object"):
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._counted(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return self._originals[name](*arguments, **settings)

        return call


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
