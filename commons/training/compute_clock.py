"""How long a rank computes in a step, apart from what it waits for."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from commons.pipeline.sharded_modules import outermost_sharded


class _Mark(Protocol):
    """A moment, as an event of CUDA is one."""

    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class _HostMark:
    """A moment on the host's clock."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It is over."""

    def elapsed_time(self, end_event: _HostMark) -> float:
        """Milliseconds from here to there."""
        return (end_event.seconds - self.seconds) * 1e3


@dataclass(frozen=True)
class ComputeSpan:
    """When a step's computing began and ended."""

    start: _Mark
    end: _Mark

    def seconds(self) -> float:
        """Its length; on CUDA this waits until the device has come to its end."""
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


class ComputeClock:
    """Times forward and backward of a model's dense part in training.

    A step's span begins when the embeddings of all sharded tables have arrived, and ends when their
    gradients are ready to be sent; for a model without such tables, with the forward and with the end of the
    backward's graph. A rank waits for others before the span and behind it: gradients of dense parameters
    are reduced beside the computing, and waited for behind it. In micro-batches it reaches from the first one
    to the last. Two waits can be within: where the gradients of one table are ready long before those of
    another, that of sending them; and with micro-batches those of the very first backward, in which
    DistributedDataParallel learns the graph.

    Neither host nor device waits for a mark. The clock is attached by forward hooks, which go when it goes.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._model: weakref.ref[torch.nn.Module] | None = None
        self.forget()

    def start(self, model: torch.nn.Module) -> None:
        """A step of the model begins."""
        if self._model is None or self._model() is not model:
            self._attach(model)
        self.forget()
        self._runs = True

    def span(self) -> ComputeSpan | None:
        """Of the step that began last; None before its backward, or if nothing was to be differentiated."""
        end = self._end_of_graph if self._gradients_ready is None else self._gradients_ready
        return None if self._start is None or end is None else ComputeSpan(self._start, end)

    def forget(self) -> None:
        """What runs next is no step of training."""
        self._runs = False
        self._start: _Mark | None = None
        self._gradients_ready: _Mark | None = None
        self._end_of_graph: _Mark | None = None
        self._arrived: set[int] = set()

    def _mark(self) -> _Mark:
        if not self._on_cuda:
            return _HostMark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _attach(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        clock = weakref.ref(self)

        def only_while_running(method: Callable[..., None]) -> Callable[..., None]:
            name = method.__name__

            def hook(module: torch.nn.Module, *arguments: Any) -> None:
                this = clock()
                if this is not None and this._runs and torch.is_grad_enabled():
                    getattr(this, name)(module, *arguments)

            return hook

        handles = [
            model.register_forward_pre_hook(only_while_running(self._model_begins)),
            model.register_forward_hook(only_while_running(self._model_ends)),
        ]
        hook = only_while_running(self._tables_return)
        handles += [module.register_forward_hook(hook) for module in outermost_sharded(model)]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    def _model_begins(self, model: torch.nn.Module, inputs: Any) -> None:
        if self._start is None:
            self._start = self._mark()

    def _model_ends(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        losses = output[0] if isinstance(output, tuple | list) and output else None
        if isinstance(losses, torch.Tensor) and losses.requires_grad:  # anything else is refused elsewhere
            losses.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        # Called in the order of queueing: before what DistributedDataParallel queues later, to wait in.
        torch.autograd.Variable._execution_engine.queue_callback(self._graph_ends)

    def _graph_ends(self) -> None:
        self._end_of_graph = self._mark()

    def _tables_return(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple | list) else [output]:
            if isinstance(part, LazyAwaitable):
                part.callbacks.append(lambda found: self._embeddings_arrive(module, found))
            else:
                self._embeddings_arrive(module, part)

    def _embeddings_arrive(self, module: torch.nn.Module, found: Any) -> Any:
        if id(module) not in self._arrived:  # later ones are parts of it, for micro-batches
            self._arrived.add(id(module))
            self._start = self._mark()
        for tensor in _tensors(found):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_is_ready)
        return found

    def _gradient_is_ready(self, gradient: torch.Tensor) -> None:
        self._gradients_ready = self._mark()


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
