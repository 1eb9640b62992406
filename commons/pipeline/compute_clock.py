"""Measures how long a rank computes in a step, without the time it waits for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from .sharded_modules import outermost_sharded

# A moment on the device's stream, or on the host's clock in seconds.
_Mark = torch.cuda.Event | float


@dataclass(frozen=True)
class ComputeSpan:
    """The start and the end of a step's computation."""

    start: _Mark
    end: _Mark

    def seconds(self) -> float:
        """Returns its length; on CUDA, waits until the device has reached its end."""
        if isinstance(self.start, float) or isinstance(self.end, float):
            return float(self.end) - float(self.start)  # type: ignore[arg-type]
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


class ComputeClock:
    """Times forward and backward of a model's dense part, by hooks that stay on the model.

    Call `begin` right before a training step, and `span` after it. Neither host nor device waits for a mark.

    A span starts when the embeddings of all sharded tables have arrived. It ends when their gradients are
    ready to be sent. Without such tables it starts with the forward and ends with the backward's graph.
    Waits for other ranks lie outside: dense gradients are reduced alongside the computation, and waited for
    after it. With micro-batches the span reaches from the first one to the last.

    Three waits can lie inside. Where samples are cut, pieces wait for keys and values; the log subtracts what
    the host waited for them. If one table's gradients are ready long before another's, sending them does.
    With micro-batches, so do the waits of the very first backward, in which DistributedDataParallel learns
    the graph.

    Args:
        model: the sharded model to time.
        device: the device it runs on.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.begin()
        model.register_forward_pre_hook(self._model_begins)
        model.register_forward_hook(self._model_ends)
        for module in outermost_sharded(model):
            module.register_forward_hook(self._tables_return)

    def begin(self) -> None:
        """Forgets the last step; call right before the next one."""
        self._start: _Mark | None = None
        self._gradients_ready: _Mark | None = None
        self._end_of_graph: _Mark | None = None
        self._arrived: set[torch.nn.Module] = set()

    def span(self) -> ComputeSpan | None:
        """Returns the span of the step since `begin`; None without a backward."""
        end = self._end_of_graph if self._gradients_ready is None else self._gradients_ready
        return None if self._start is None or end is None else ComputeSpan(self._start, end)

    def _mark(self) -> _Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _model_begins(self, model: torch.nn.Module, inputs: Any) -> None:
        if self._start is None:
            self._start = self._mark()

    def _model_ends(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        losses = output[0] if isinstance(output, tuple | list) and output else None
        if isinstance(losses, torch.Tensor) and losses.requires_grad:  # the pipeline refuses anything else
            losses.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        # Callbacks run in queueing order: before the one that DistributedDataParallel queues later to wait.
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
        if module not in self._arrived:  # later arrivals are parts of it, for micro-batches
            self._arrived.add(module)
            self._start = self._mark()
        for tensor in _tensors(found):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_is_ready)
        return found

    def _gradient_is_ready(self, gradient: torch.Tensor) -> None:
        self._gradients_ready = self._mark()


def check_waits(
    model: torch.nn.Module, device: torch.device, cuts_samples: bool, loss_reduction: str
) -> None:
    """Checks that spans hold no waits for other ranks, which would pass for computation.

    Raises:
        ValueError: they do, and cannot be subtracted.
    """
    reason = None
    if cuts_samples and device.type == "cuda":
        reason = "split=True makes the device wait for keys and values of other ranks within a step"
    if loss_reduction == "global_mean":
        reason = 'loss_reduction="global_mean" means that the model waits for the other ranks\' counts'
    for module in model.modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            reason = "SyncBatchNorm waits for all ranks within a step"
        elif isinstance(module, FullyShardedDataParallel | FSDPModule):
            reason = "a fully sharded module waits for its parameters within a step"
        elif isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
            reason = (
                "DistributedDataParallel waits for rank 0's buffers at the start of a step, unless "
                "broadcast_buffers=False"
            )
    if reason is not None:
        raise ValueError(
            f'cost="learned": {reason}, and that cannot be told from computation; use workloads, or the cost '
            "that a calibration measured"
        )


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
