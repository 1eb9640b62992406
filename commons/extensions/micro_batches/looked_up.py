"""Results of a sharded module for a whole batch, divided among its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ...jagged_indices import spread


class LookedUp:
    """The result of one call of a sharded module for the whole batch.

    Args:
        whole: dict of JaggedTensors, as from an EmbeddingCollection; KeyedTensor, as from an
            EmbeddingBagCollection; tensor with one row per row of the batch; tuple of these; or None.
        rows: rows of each micro-batch, int64.
    """

    def __init__(self, whole: Any, rows: Sequence[torch.Tensor]) -> None:
        self.tensors: list[LookedUpTensor] = []
        self._rows = rows
        self._whole = _mapped(self._registered, whole)
        jagged = [tensor for tensor in self.tensors if isinstance(tensor, _Jagged)]
        if jagged:  # count their elements in each micro-batch, with one transfer from the device
            lengths = torch.stack([tensor.lengths for tensor in jagged])
            totals = torch.stack([lengths[:, part_rows].sum(1) for part_rows in rows], 1).tolist()
            for tensor, part_totals in zip(jagged, totals, strict=True):
                tensor.totals = part_totals

    def part(self, number: int) -> Any:
        """Returns the result for a micro-batch."""
        return _mapped(lambda tensor: tensor.part(self._rows[number], number), self._whole)

    def _registered(self, value: Any) -> LookedUpTensor:
        tensor: LookedUpTensor
        if isinstance(value, JaggedTensor):
            tensor = _Jagged(value)
        elif isinstance(value, KeyedTensor):
            tensor = _Keyed(value)
        elif isinstance(value, torch.Tensor):
            tensor = LookedUpTensor(value)
        else:
            raise TypeError(
                f"a sharded module returns a {type(value).__name__}, which cannot be divided into "
                "micro-batches; expected a dict of JaggedTensors, a KeyedTensor or a tensor"
            )
        self.tensors.append(tensor)
        return tensor


class LookedUpTensor:
    """A looked-up tensor with one row per row of the batch, whose values are `[any, ...]`.

    `gradient` is that of `values` from the parts so far. None before the first one, or if none is needed.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.gradient: torch.Tensor | None = None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # positions and values of the last part

    def part(self, rows: torch.Tensor, number: int) -> Any:
        """Returns the part of micro-batch `number`, which has the given rows, int64 `[rows]`."""
        return _padded(self._select(rows))

    def collect_gradient(self) -> None:
        """Adds the gradient of the last part to its rows in `gradient`."""
        if self._last is not None and self._last[1].requires_grad:
            positions, leaf = self._last
            if self.gradient is None:
                self.gradient = torch.zeros_like(self.values)
            if leaf.grad is not None:
                # In a part without samples, a row stands in for them, and its gradient is zero.
                self.gradient.index_add_(0, positions, leaf.grad)
        self._last = None

    def _select(self, positions: torch.Tensor) -> torch.Tensor:
        leaf = self.values.detach().index_select(0, positions)
        leaf.requires_grad_(self.values.requires_grad and torch.is_grad_enabled())
        self._last = positions, leaf
        return leaf


class _Keyed(LookedUpTensor):
    """The values of a KeyedTensor."""

    def __init__(self, whole: KeyedTensor) -> None:
        super().__init__(whole.values())
        self._whole = whole

    def part(self, rows: torch.Tensor, number: int) -> KeyedTensor:
        values = super().part(rows, number)
        return KeyedTensor(self._whole.keys(), self._whole.length_per_key(), values)


class _Jagged(LookedUpTensor):
    """The values of a JaggedTensor.

    Attributes:
        lengths: lengths of the rows, int64 `[batch_size]`.
        totals: sum of the lengths in each micro-batch.
    """

    def __init__(self, whole: JaggedTensor) -> None:
        super().__init__(whole.values())
        self._weights, self._dtype = whole.weights_or_none(), whole.lengths().dtype
        self.lengths = whole.lengths().long()
        self.totals: list[int] = []
        self._starts = self.lengths.cumsum(0) - self.lengths

    def part(self, rows: torch.Tensor, number: int) -> JaggedTensor:
        lengths = self.lengths[rows]
        positions = spread(self._starts[rows], lengths, self.totals[number])
        return JaggedTensor(
            values=self._select(positions),
            weights=None if self._weights is None else self._weights.index_select(0, positions),
            lengths=_padded(lengths.to(self._dtype)),
        )


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `value` with `function` applied to each tensor in it."""
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, element) for element in value)
    if isinstance(value, dict):
        return {key: _mapped(function, element) for key, element in value.items()}
    return None if value is None else function(value)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Adds a padding row to a micro-batch without samples, so that its loss has a graph."""
    return rows if len(rows) else functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))
