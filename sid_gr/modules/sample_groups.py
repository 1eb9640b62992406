"""Short samples of similar length in one tensor, because a call for each would cost more than its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from commons.sequence_batch.packed_rows import to_device_together

# Longest sample that shares a call. Above, copying and padding take as long as the calls that they save.
LONGEST_SHORT = 32
# Short samples are padded to a multiple of this many tokens, whatever their company.
PADDED_TO = 8
# Fewer samples of one padded length are not worth copying.
MIN_TOGETHER = 8


class SampleGroups:
    """The samples of a batch, divided into tensors of equally long ones; made once per batch.

    Args:
        lengths: tokens of each sample, on the host.
        device: of the tokens.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        host_lengths = np.array(lengths, np.int64)
        ends = host_lengths.cumsum()
        padded = -(-host_lengths // PADDED_TO) * PADDED_TO
        is_grouped = np.zeros(len(lengths), bool)
        self._shapes: list[tuple[int, int]] = []  # samples and padded length of each group
        members: list[np.ndarray] = []
        for length in range(PADDED_TO, LONGEST_SHORT + 1, PADDED_TO):
            (of_length,) = np.nonzero(padded == length)
            if len(of_length) >= MIN_TOGETHER:
                is_grouped[of_length] = True
                self._shapes.append((len(of_length), length))
                members.append(of_length)
        self._others = [
            (int(ends[sample] - length), int(ends[sample]))
            for sample, length in enumerate(lengths)
            if length and not is_grouped[sample]
        ]
        self._num_tokens = sum(lengths)
        if members:
            self._to_device(host_lengths[np.concatenate(members)], ends[np.concatenate(members)], device)

    def _to_device(self, lengths: np.ndarray, ends: np.ndarray, device: torch.device) -> None:
        """Sets the indices of the grouped samples, of which these are the lengths and ends."""
        sizes = np.concatenate([np.full(*shape) for shape in self._shapes])  # padded length of each sample
        in_sample = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
        is_token = in_sample < lengths.repeat(sizes)
        # Padding reads the sample's own first token, so that a value that is not finite stays within it.
        sources = (ends - lengths).repeat(sizes) + np.where(is_token, in_sample, 0)
        (places,) = np.nonzero(is_token)
        places = places[sources[places].argsort()]
        arrays = [sources, places, sources[places]]
        self._sources, self._places, self._tokens = to_device_together(arrays, device)

    def divide(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns groups of short samples and all other samples, `[samples, length, ...]` each.

        Args:
            x: `[total_tokens, ...]`.
        """
        if not self._shapes:
            # `split` and not slices: its backward is one concatenation, a slice's fills a tensor per sample.
            return [
                of_sample.unsqueeze(0) for of_sample in x.split([end - start for start, end in self._others])
            ]
        grouped, *others = _Divide.apply(x, self)
        groups = grouped.split([samples * length for samples, length in self._shapes])
        return [
            *(group.unflatten(0, shape) for group, shape in zip(groups, self._shapes, strict=True)),
            *(of_sample.unsqueeze(0) for of_sample in others),
        ]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the parts, shaped as those of `divide`, as `[total_tokens, ...]`."""
        flat = [part.flatten(0, 1) for part in parts]
        if not self._shapes:
            return torch.cat(flat)
        grouped, others = flat[: len(self._shapes)], flat[len(self._shapes) :]
        return _Join.apply(self, torch.cat(grouped), *others)

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tokens of the groups, padded, one after another; then views of the other samples."""
        return x.index_select(0, self._sources), *(x[start:end] for start, end in self._others)

    def put(self, grouped: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what `take` was given; padding is left out."""
        of_groups = grouped.index_select(0, self._places)
        if not self._others:
            return of_groups
        x = grouped.new_empty(self._num_tokens, *grouped.shape[1:])
        x.index_copy_(0, self._tokens, of_groups)
        for (start, end), values in zip(self._others, others, strict=True):
            x[start:end] = values
        return x

    def take_without_padding(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what `take` does, with zeros for padding."""
        grouped = x.new_zeros(len(self._sources), *x.shape[1:])
        grouped.index_copy_(0, self._places, x.index_select(0, self._tokens) if self._others else x)
        return grouped, *(x[start:end] for start, end in self._others)


class _Divide(torch.autograd.Function):
    """`take`, with a backward that writes every token's gradient once; autograd's would add up tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: SampleGroups) -> tuple[torch.Tensor, ...]:
        ctx.groups = groups
        return groups.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grouped: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.groups.put(grouped, others), None


class _Join(torch.autograd.Function):
    """`put`."""

    @staticmethod
    def forward(ctx: Any, groups: SampleGroups, grouped: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.groups = groups
        return groups.put(grouped, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.groups.take_without_padding(grad)
