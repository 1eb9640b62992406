"""Recomputes activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@contextmanager
def recomputed_in_backward(
    result: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], argument: torch.Tensor
) -> Iterator[None]:
    """While active, keeps autograd from saving `result` or its views; backward recomputes them.

    All views share one computation per backward pass. Unlike with `torch.utils.checkpoint`, the operations
    that use `result` do not run again.

    Args:
        result: `function(argument)`, contiguous.
        function: deterministic function. In backward, it runs under the autocast state that is active here.
        argument: tensor kept for backward instead of `result`.
    """
    source = _Source(function, argument.detach())
    # While `result` is alive, no other storage has its address, except that empty and meta ones share 0.
    address, dtype = result.untyped_storage().data_ptr(), result.dtype

    def pack(saved: torch.Tensor) -> torch.Tensor | _View:
        if not address or saved.untyped_storage().data_ptr() != address or saved.dtype != dtype:
            return saved
        source.num_views += 1
        return _View(source, saved.shape, saved.stride(), int(saved.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


class _Source:
    """Recomputes a tensor, and keeps it until each view has been used once.

    Args:
        function: function that computes the tensor from `argument`.
        argument: detached tensor.

    Attributes:
        num_views: number of saved views.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], argument: torch.Tensor) -> None:
        self.num_views = 0
        self._function, self._argument = function, argument
        # Backward may run in another thread, where autocast is off.
        device = argument.device.type
        self._autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._result: torch.Tensor | None = None
        self._num_used = 0

    def use(self) -> torch.Tensor:
        """Returns the tensor."""
        if self._result is None:
            dtype, enabled = self._autocast
            with torch.no_grad(), torch.autocast(self._argument.device.type, dtype, enabled):
                self._result = self._function(self._argument)
            self._num_used = 0
        result = self._result
        self._num_used += 1
        if self._num_used >= self.num_views:
            self._result = None
        return result


@dataclass(frozen=True)
class _View:
    """A view of a recomputed tensor."""

    source: _Source
    shape: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


def _unpack(packed: torch.Tensor | _View) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    return packed.source.use().as_strided(packed.shape, packed.stride, packed.storage_offset)
