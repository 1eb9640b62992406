"""Causal attention over jagged sequences; the cost is the sum of the squared lengths."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from commons.sequence_batch.packed_rows import to_device_together

try:
    from torch.nn.attention import varlen
except ImportError:  # before PyTorch 2.10
    varlen = None  # type: ignore[assignment]

# Widest head that PyTorch's flash attention can train on all chips.
MAX_VARLEN_HEAD_DIM = 192
# Longest sample that shares a call. Above, copying and padding take as long as the calls that they save.
LONGEST_SHORT = 32
# Short samples are padded to a multiple of this many tokens, whatever their company.
PADDED_TO = 8
# Fewer samples of one padded length are not worth copying.
MIN_TOGETHER = 8


class Attention(Protocol):
    """Attention of the decoder's layers."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the shape of q, `[tokens, num_heads, head_dim]`; k and v have `num_kv_heads` heads."""


class JaggedCausalAttention:
    """Causal scaled-dot-product attention within each sample; make one per batch.

    On CUDA, bfloat16 and float16 run PyTorch's variable-length attention, one kernel for all samples, where
    there is one. Otherwise each sample is one call, and short samples of similar length share one.

    Args:
        lengths: tokens of each sample, on the host; q, k and v concatenate the samples.
        keep: whether to keep keys and values, to extend the sequences later.

    Attributes:
        keys_values: keys and values of each layer that has run, if kept.
    """

    def __init__(self, lengths: Sequence[int], keep: bool = False) -> None:
        self._lengths = list(lengths)
        self._keep = keep
        self._offsets: torch.Tensor | None = None
        self._groups: _SampleGroups | None = None
        self.keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the attention of all samples; no host-device synchronization.

        Raises:
            ValueError: the lengths do not add up to the number of tokens.
        """
        if sum(self._lengths) != q.shape[0]:
            raise ValueError(f"the samples have {sum(self._lengths)} tokens, q, k and v {q.shape[0]}")
        if self._keep:
            self.keys_values.append((k, v))
        if not len(q):
            return q
        if has_varlen(q):
            if self._offsets is None:
                (offsets,) = to_device_together([np.cumsum([0, *self._lengths])], q.device)
                self._offsets = offsets.int()
            return varlen_causal_attention(q, k, v, self._offsets, max(self._lengths))
        if self._groups is None:
            self._groups = _SampleGroups(self._lengths, q.device)
        parts = zip(*(self._groups.divide(tensor) for tensor in (q, k, v)), strict=True)
        return self._groups.join([_causal_attention(*part) for part in parts])


def _causal_attention(q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
    """Computes B samples of T tokens, H heads, D head_dim; k and v may have fewer heads."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHD, k_BTHD, v_BTHD))
    # PyTorch's kernel for CPUs takes grouped heads as they are; expanding them is slower.
    grouped = k.shape[1] != q.shape[1]
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return attended.transpose(1, 2)


def has_varlen(q: torch.Tensor) -> bool:
    """Returns whether PyTorch's variable-length attention runs here, forward and backward."""
    return (
        varlen is not None
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] % 8 == 0
        and q.shape[2] <= MAX_VARLEN_HEAD_DIM
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def varlen_causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int
) -> torch.Tensor:
    """Runs PyTorch's variable-length attention, causal within each sample; needs PyTorch 2.10.

    Args:
        q: `[total_tokens, num_heads, head_dim]`.
        k, v: the same, with num_heads or fewer heads.
        offsets: int32 `[samples + 1]`, first token of each sample, then the number of all tokens.
        longest: tokens of the longest sample.

    Returns:
        The shape of q.

    Raises:
        ImportError: PyTorch is older.
    """
    if varlen is None:
        raise ImportError(f"torch is {torch.__version__}; expected 2.10 or later for varlen_attn")
    accepted = inspect.signature(varlen.varlen_attn).parameters
    # PyTorch 2.10 takes `is_causal`, later versions a window; some of them no grouped heads.
    settings: dict[str, Any] = {"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)}
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in accepted:
            settings["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    attended: Any = varlen.varlen_attn(q, k, v, offsets, offsets, longest, longest, **settings)
    return attended


class _SampleGroups:
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
    def forward(ctx: Any, x: torch.Tensor, groups: _SampleGroups) -> tuple[torch.Tensor, ...]:
        ctx.groups = groups
        return groups.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grouped: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.groups.put(grouped, others), None


class _Join(torch.autograd.Function):
    """`put`."""

    @staticmethod
    def forward(
        ctx: Any, groups: _SampleGroups, grouped: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.groups = groups
        return groups.put(grouped, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.groups.take_without_padding(grad)
