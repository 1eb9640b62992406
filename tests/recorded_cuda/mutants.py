"""Faults of order, lifetime and waiting, to be put in while a case runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchrec.distributed.train_pipeline.train_pipelines as torchrec_pipelines

from commons.distributed import exchange, plan_ahead
from commons.extensions.learned_costs import learning
from commons.perf_model import compute_clock
from commons.pipeline import train_pipelines
from commons.sequence_batch import packed_rows
from commons.training import step_vote
from tests.commons.distributed.internals import Step
from tests.commons.sequence_batch.internals import Rows, Selection

from . import modes
from .clocks import DEVICE, Stream, call_site

Mutant = Callable[[], AbstractContextManager[Any]]
_OWN = Stream(name="of its own")


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    """Returns a mutant that replaces `owner.name` by what `make` makes of it."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _both(*mutants: Mutant) -> Mutant:
    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for mutant in mutants:
                stack.enter_context(mutant())
            yield

    return all_of_them


def _does_not_wait(on_default: bool) -> Callable[[Any], Any]:
    """TorchRec's wait for a batch, which only records it on the default stream, or on another."""

    def make(wait: Any) -> Any:
        def waits(batch: Any, stream: Any) -> None:
            if (DEVICE.current is DEVICE.default) == on_default:
                batch.record_stream(DEVICE.current)
            else:
                wait(batch, stream)

        return waits

    return make


def _records(chosen: Callable[[list[str]], list[str]]) -> Mutant:
    """Records the chosen fields of a batch alone."""

    def records(rows: Any, stream: Any) -> None:
        for name in chosen(list(rows.fields)):
            rows.fields[name].record_stream(stream)

    return _instead(Rows, "record_stream", lambda _: records)


def _exchange_on_default(waits: bool) -> Mutant:
    def copy_batch_to_gpu(self: Any, dataloader_iter: Any) -> Any:
        batch, context = super(train_pipelines.ShuffleStageMixin, self).copy_batch_to_gpu(dataloader_iter)
        if batch is not None:
            with DEVICE.on(DEVICE.default):
                if waits:
                    DEVICE.current.wait_stream(self._memcpy_stream)
                batch = self._stage.exchange(batch)
        return batch, context

    return _instead(train_pipelines.ShuffleStageMixin, "copy_batch_to_gpu", lambda _: copy_batch_to_gpu)


def _not_ordered(all_to_all: Any) -> Any:
    """A collective on its group's stream, for which the current one does not wait."""

    def asynchronous(*args: Any, **kwargs: Any) -> None:
        work = all_to_all(*args, **{**kwargs, "async_op": True})
        if work is not None:
            work._work.wait()  # in fact, but not on the streams

    return asynchronous


def _of_exchange(make: Callable[[Any], Any]) -> Mutant:
    """Returns a mutant of the all-to-all of an exchange alone."""
    return lambda: mock.patch.object(
        exchange,
        "dist",
        SimpleNamespace(**{**vars(dist), "all_to_all_single": make(dist.all_to_all_single)}),
    )


def _only_in_fact(wait: Any) -> Any:
    return lambda self, *args: (self._work.wait if "key_fetch" in call_site() else partial(wait, self))(*args)


def _reuses_buffer(_: Any) -> Any:
    buffer: list[torch.Tensor] = []

    def to_device(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            return indices
        if not buffer:
            buffer.append(torch.empty(100_000, dtype=torch.int64, pin_memory=True))
        return buffer[0][: len(indices)].copy_(indices).to(device, non_blocking=True)

    return to_device


def _reads_a_size(gather: Any) -> Any:
    def gathers(sources: Any, selection: Any) -> Any:
        gathered = gather(sources, selection)
        for field in gathered.values():
            if not isinstance(field, torch.Tensor):
                int(field.lengths().sum())
        return gathered

    return gathers


def _times_early(_: Any) -> Any:
    def seconds(self: Any) -> float:
        return 0.0 if self.start is None or self.end is None else self.start.elapsed_time(self.end) / 1e3

    return seconds


def _launches(plan: Any) -> Any:
    """Planning that also exchanges, in a group of its own, or messages of two threads would mix."""
    group = dist.new_group()

    def plans(*arguments: Any) -> Any:
        ones = torch.ones(2, device=modes.CUDA)
        dist.all_to_all_single(torch.empty_like(ones), ones, group=group)
        return plan(*arguments)

    return plans


def _skips_unsent(all_to_all: Any) -> Any:
    """An exchange that a rank with nothing to send takes no part in; in fact it does, or it would hang."""

    def exchanges(received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        if len(sent):
            return all_to_all(received, sent, *args, **kwargs)
        with modes.flag("collective", True):
            return all_to_all(received, sent, *args, **kwargs)

    return exchanges


def _exchange_after_the_event(_: Any) -> Any:
    """As TorchRec's semi-synchronous pipeline leaves the event, which it records after the copy."""

    def copy_batch_to_gpu(self: Any, dataloader_iter: Any) -> Any:
        batch, context = super(train_pipelines.ShuffleStageMixin, self).copy_batch_to_gpu(dataloader_iter)
        if batch is not None:
            with DEVICE.on(self._memcpy_stream):
                batch = self._stage.exchange(batch)
        return batch, context

    return copy_batch_to_gpu


def _looks_up_on(stream: Stream) -> Mutant:
    """Has TorchRec's fused pipeline look tables up on another stream than that of the input distribution."""

    def start(start_embedding_lookup: Any) -> Any:
        def starts(self: Any, batch: Any, context: Any) -> None:
            self._emb_lookup_stream = stream
            start_embedding_lookup(self, batch, context)

        return starts

    return _instead(torchrec_pipelines.TrainPipelineFusedSparseDist, "start_embedding_lookup", start)


MUTANTS: dict[str, Mutant] = {
    "data_dist does not wait for memcpy": _instead(
        torchrec_pipelines, "_wait_for_batch", _does_not_wait(on_default=False)
    ),
    "default does not wait at the step": _instead(
        torchrec_pipelines, "_wait_for_batch", _does_not_wait(on_default=True)
    ),
    "default does not wait at the lookup": _instead(
        Stream,
        "wait_stream",
        lambda wait: lambda self, other: None if "runtime_forwards" in call_site() else wait(self, other),
    ),
    "a batch is not recorded": _instead(Step, "record_stream", lambda _: lambda self, stream: None),
    "a tensor is not recorded": _records(lambda names: names[:-1]),
    "a shared tensor is not recorded": _records(lambda names: names),
    "a tensor of TorchRec's batch is not recorded": _records(
        lambda names: [name for name in names if "sparse" in name]
    ),
    "the exchange on the default stream": _exchange_on_default(waits=False),
    "the exchange on the default stream after the copy": _exchange_on_default(waits=True),
    "streams of its own for evaluation": _instead(
        train_pipelines, "_stream", lambda _: lambda device, use: Stream(name=f"{use} of its own")
    ),
    "no event after the exchange": _instead(
        train_pipelines.ShuffleStageMixin, "copy_batch_to_gpu", _exchange_after_the_event
    ),
    "a lookup stream of its own": _looks_up_on(_OWN),
    "the exchange is not waited for": _of_exchange(_not_ordered),
    "a fetch of pieces is not waited for": _instead(modes.RecordedWork, "wait", _only_in_fact),
    "a pinned buffer is used again": _instead(packed_rows, "to_device", _reuses_buffer),
    "indices in pageable memory": _both(
        _instead(Selection, "pinned", lambda _: lambda self: self),
        _instead(
            packed_rows,
            "to_device",
            lambda _: lambda indices, device: indices.to(device, non_blocking=True),
        ),
    ),
    "indices on the host": _instead(packed_rows, "to_device", lambda _: lambda indices, device: indices),
    "a size is read": _instead(exchange, "gather_fields", _reads_a_size),
    "a vote is read early": _instead(step_vote._Loss, "read", lambda _: lambda self: float(self._on_host)),
    "times are read early": _both(
        _instead(compute_clock.ComputeSpan, "seconds", _times_early),
        _instead(learning, "_DELAY", lambda _: 4),  # 8 steps later, other waits have covered them
    ),
    "planning launches a collective": _instead(plan_ahead.PlanAhead, "_plan", _launches),
    "a rank skips an exchange": _of_exchange(_skips_unsent),
}
