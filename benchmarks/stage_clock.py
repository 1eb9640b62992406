"""Times what a pipeline's shuffle stage does, on the main thread and beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from benchmarks.harness import time_call
from commons.pipeline.shuffle_stage import ShuffleStage


class StageClock:
    """Wraps a stage's calls; before each the ranks wait for each other, so that it absorbs no rank skew.

    Attributes:
        milliseconds: of each step "exposed" (main thread in the stage, loading not counted) and "exchange";
            and of each plan "planning", in its thread.
    """

    def __init__(self, stage: ShuffleStage) -> None:
        self.milliseconds: dict[str, list[float]] = {"exposed": [], "exchange": [], "planning": []}
        self._next_batch, self._exchange = stage.next_batch, stage.exchange
        shuffler = stage._shuffler
        self._plan_with = shuffler.plan_with
        stage.next_batch = self._time_next_batch  # type: ignore[method-assign]
        stage.exchange = self._time_exchange  # type: ignore[method-assign]
        shuffler.plan_with = self._time_plan  # type: ignore[method-assign]
        self._loading = self._before_exchange = 0.0

    def clear(self) -> None:
        """Forgets what was measured so far."""
        for times in self.milliseconds.values():
            times.clear()

    def watch(self, loader: Iterator[Any]) -> Iterator[Any]:
        """Yields the loader's batches, and notes the time that it takes for them."""
        while True:
            start = time.perf_counter()
            batch = next(loader, None)
            self._loading += (time.perf_counter() - start) * 1e3
            if batch is None:
                return
            yield batch

    def _time_next_batch(self, loader: Iterator[Any]) -> Any:
        dist.barrier()
        self._loading = 0.0
        batch, taken = time_call(lambda: self._next_batch(loader))
        self._before_exchange = taken - self._loading
        return batch

    def _time_exchange(self, batch: Any) -> Any:
        dist.barrier()
        exchanged, taken = time_call(lambda: self._exchange(batch))
        self.milliseconds["exchange"].append(taken)
        self.milliseconds["exposed"].append(self._before_exchange + taken)
        return exchanged

    def _time_plan(self, *arguments: Any) -> Any:
        plan, taken = time_call(lambda: self._plan_with(*arguments))
        self.milliseconds["planning"].append(taken)
        return plan
