"""Measures how long a rank computes in a step, without the time it waits for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ..sharded_modules import outermost_sharded

# A moment on the device's stream, or on the host's clock in seconds.
_Mark = torch.cuda.Event | float


class ComputeSpan:
    """The time span of one step's computation. Its end is known after the backward."""

    def __init__(self) -> None:
        self.start: _Mark | None = None
        self.gradients_ready: _Mark | None = None
        self.end_of_graph: _Mark | None = None

    @property
    def end(self) -> _Mark | None:
        """The end of the span. None means that the backward has not ended."""
        return self.end_of_graph if self.gradients_ready is None else self.gradients_ready

    def seconds(self) -> float:
        """Returns the length of the span, 0 without a backward. On CUDA, the host waits for its end."""
        start, end = self.start, self.end
        if start is None or end is None:
            return 0.0
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class ComputeClock:
    """Times the forward and backward of a model's dense part, with hooks that stay on the model.

    `of` returns a model's one clock. Call `begin` right before a training step. All callers before the same
    step get the same span. Recording a mark makes neither host nor device wait.

    A span starts when the embeddings of all sharded tables have arrived, and ends when their gradients are
    ready to be sent. Without sharded tables, it starts with the forward and ends with the backward's graph.
    Waits for other ranks lie outside, because dense gradients are reduced during the computation and waited
    for after it. With micro-batches, the span reaches from the first one to the last.

    Two waits can lie inside the span. If one table's gradients are ready long before another's, the span
    includes sending them. With micro-batches, it includes the waits of the very first backward, in which
    DistributedDataParallel learns the graph.

    Args:
        model: the sharded model to time.
        device: device that the model runs on.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._on_cuda, self._waited = device.type == "cuda", lambda: 0.0
        self._span = ComputeSpan()
        self._arrived: set[torch.nn.Module] = set()  # sharded modules whose embeddings have arrived
        model.register_forward_pre_hook(self._model_begins)
        model.register_forward_hook(self._model_ends)
        for module in outermost_sharded(model):
            module.register_forward_hook(self._tables_return)

    @staticmethod
    def of(model: torch.nn.Module, device: torch.device, waited: Callable[[], float]) -> ComputeClock:
        """Returns the clock of a model. The first call makes it.

        `waited` returns the seconds that the host has waited for other ranks within forward and backward. The
        clock subtracts them, except on CUDA.
        """
        if model not in _clock_of:
            _clock_of[model] = ComputeClock(model, device)
        _clock_of[model]._waited = waited
        return _clock_of[model]

    def begin(self) -> ComputeSpan:
        """Returns the span of the next step, which that step's forward and backward fill in."""
        if self._span.start is not None:
            self._span = ComputeSpan()
            self._arrived = set()
        return self._span

    def _mark(self) -> _Mark:
        if not self._on_cuda:
            return time.perf_counter() - self._waited()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _model_begins(self, model: torch.nn.Module, inputs: Any) -> None:
        if self._span.start is None and model.training:  # evaluation between two steps belongs to neither
            self._span.start = self._mark()

    def _model_ends(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        losses = output[0] if isinstance(output, tuple | list) and output else None
        if isinstance(losses, torch.Tensor) and losses.requires_grad:  # the pipeline refuses anything else
            losses.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        # Callbacks run in the order of queueing, and DistributedDataParallel queues its wait after this one.
        torch.autograd.Variable._execution_engine.queue_callback(self._graph_ends)

    def _graph_ends(self) -> None:
        self._span.end_of_graph = self._mark()

    def _tables_return(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple | list) else [output]:
            if isinstance(part, LazyAwaitable):
                part.callbacks.append(lambda found: self._embeddings_arrive(module, found))
            else:
                self._embeddings_arrive(module, part)

    def _embeddings_arrive(self, module: torch.nn.Module, found: Any) -> Any:
        if module.training and module not in self._arrived:
            # With micro-batches, later arrivals are parts of the embeddings that arrived first.
            self._arrived.add(module)
            self._span.start = self._mark()
        for tensor in _tensors(found):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_is_ready)
        return found

    def _gradient_is_ready(self, gradient: torch.Tensor) -> None:
        self._span.gradients_ready = self._mark()


_clock_of: WeakKeyDictionary[torch.nn.Module, ComputeClock] = WeakKeyDictionary()


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, JaggedTensor | KeyedTensor):
        yield found.values()
    elif isinstance(found, dict):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, tuple | list):
        for value in found:
            yield from _tensors(value)
