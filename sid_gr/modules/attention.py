"""Causal attention over jagged sequences; the cost is the sum of the squared lengths."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from commons.jagged_indices import to_device_together

try:
    from torch.nn.attention import varlen
except ImportError:  # before PyTorch 2.10
    varlen = None  # type: ignore[assignment]

# Widest head that PyTorch's flash attention can train on all chips.
MAX_VARLEN_HEAD_DIM = 192
# Length of the longest samples that share a call. Copying longer ones takes as long as the calls it saves.
LONGEST_SHARING = 32
# Fewer samples of equal length are not worth copying.
MIN_SHARING = 4
# Queries of a piece per call. A call also computes masked pairs, up to half the square of this number.
QUERIES_PER_BLOCK = 512


class Attention(Protocol):
    """The attention of the decoder's layers."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the attended values, `[tokens, num_heads, head_dim]`; k and v may have fewer heads."""


class JaggedCausalAttention:
    """Causal scaled-dot-product attention within each sample; make one per batch.

    On CUDA, bfloat16 and float16 run PyTorch's variable-length attention if it is available, one kernel for
    all samples. Otherwise each sample takes one call, and short samples of equal length share a call. Nothing
    is padded.

    Args:
        lengths: number of tokens of each sample, on the host; q, k, and v concatenate the samples.
        keep: whether to keep keys and values, to extend the sequences later.

    Attributes:
        keys_values: keys and values of each layer that has run, if kept.
        key_starts: index in the keys of each sample's first key.
    """

    def __init__(self, lengths: Sequence[int], keep: bool = False) -> None:
        self._lengths = list(lengths)
        self._keep = keep
        self._offsets: torch.Tensor | None = None
        self._groups: _SampleGroups | None = None
        self.keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.key_starts = (np.cumsum(self._lengths, dtype=np.int64) - self._lengths).tolist()

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the attention of all samples, without host-device synchronization.

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
            longest = max(self._lengths)
            return varlen_causal_attention(q, k, v, self._offsets, longest, self._offsets, longest)
        if self._groups is None:
            self._groups = _SampleGroups(self._lengths, q.device)
        parts = zip(*(self._groups.divide(tensor) for tensor in (q, k, v)), strict=True)
        return self._groups.join([_causal_attention(*part) for part in parts])


class LastQueriesAttention:
    """Causal attention in which only the last tokens of a sample are queries; make one per batch.

    Args:
        lengths: number of queries of each sample, on the host.
        num_keys: number of keys of each sample.
        device: device of the tokens.
    """

    def __init__(self, lengths: list[int], num_keys: list[int], device: torch.device) -> None:
        self._lengths, self.num_keys = lengths, num_keys
        ends = [np.cumsum([0, *sample_lengths]) for sample_lengths in (lengths, num_keys)]
        self._offsets = [sample_lengths.int() for sample_lengths in to_device_together(ends, device)]
        self._mask: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the attended values, `[queries, num_heads, head_dim]` like q.

        Args:
            q: queries of all samples.
            k, v: `[keys, num_kv_heads, head_dim]`, keys and values of all samples.
        """
        if not self._lengths:  # still depends on k and v, whose backward is collective
            return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        if has_varlen(q):
            queries, keys = self._offsets
            return varlen_causal_attention(q, k, v, queries, max(self._lengths), keys, max(self.num_keys))
        if self._mask is None:
            size = min(max(self._lengths), QUERIES_PER_BLOCK), max(self.num_keys)
            hidden = torch.full(size, -torch.inf, dtype=q.dtype, device=q.device)
            self._mask = hidden.triu_(size[1] - size[0] + 1)
        samples = zip(q.split(self._lengths), k.split(self.num_keys), v.split(self.num_keys), strict=True)
        return torch.cat([block for sample in samples for block in self._blocks(self._mask, *sample)])

    @staticmethod
    def _blocks(
        mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yields the attention of a sample's queries, block by block. A block skips the keys after it."""
        end = len(k) - len(q)
        for block in q.split(QUERIES_PER_BLOCK):
            end += len(block)
            # The mask's lower right corner hides the keys after each query, for blocks of any size.
            hidden = mask[len(mask) - len(block) :, mask.shape[1] - end :]
            q_BHTD, k_BHTD, v_BHTD = (x.transpose(0, 1).unsqueeze(0) for x in (block, k[:end], v[:end]))
            attended = scaled_dot_product_attention(
                q_BHTD, k_BHTD, v_BHTD, attn_mask=hidden, enable_gqa=k.shape[1] != q.shape[1]
            )
            yield attended.squeeze(0).transpose(0, 1)


def _causal_attention(q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
    """Computes B samples of T tokens, with H heads of width D; k and v may have fewer heads."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHD, k_BTHD, v_BTHD))
    # PyTorch's CPU kernel takes grouped heads as they are, and expanding them would be slower.
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    key_offsets: torch.Tensor,
    most_keys: int,
) -> torch.Tensor:
    """Runs PyTorch's variable-length attention, causal within each sample; needs PyTorch 2.10.

    A sample may have more keys than queries; its queries are then the last tokens.

    Args:
        q: `[total_tokens, num_heads, head_dim]`.
        k, v: `[total_keys, …]`, with num_heads or fewer heads.
        offsets: first query of each sample, then the number of all queries, int32 `[samples + 1]`.
        longest: largest number of queries of a sample.
        key_offsets, most_keys: counterparts of `offsets` and `longest` for keys.

    Returns:
        The attended values, shaped like q.

    Raises:
        ImportError: PyTorch is older than 2.10.
    """
    if varlen is None:
        raise ImportError(f"torch is {torch.__version__}; expected 2.10 or later for varlen_attn")
    accepted = _varlen_parameters()
    # PyTorch 2.10 takes `is_causal`, and later versions take a window. Some versions lack grouped heads.
    settings: dict[str, Any] = {"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)}
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in accepted:
            settings["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    attended: Any = varlen.varlen_attn(q, k, v, offsets, key_offsets, longest, most_keys, **settings)
    return attended


@cache
def _varlen_parameters() -> frozenset[str]:
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


class _SampleGroups:
    """The samples of a batch, grouped by length; made once per batch.

    Args:
        lengths: number of tokens of each sample, on the host.
        device: device of the tokens.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        on_host = np.array(lengths, np.int64)
        starts = on_host.cumsum() - on_host
        counts = np.bincount(on_host, minlength=1)[: LONGEST_SHARING + 1]
        counts[0] = 0
        sharing = np.flatnonzero(counts >= MIN_SHARING)
        # The other samples are copied, too, which must not cost more than the calls that are saved.
        if 2 * (sharing * counts[sharing]).sum() < on_host.sum():
            sharing = sharing[:0]
        others = np.flatnonzero(~np.isin(on_host, [0, *sharing]))
        samples = [*(np.flatnonzero(on_host == length) for length in sharing), *others[:, None]]
        self._shapes = [(len(group), int(on_host[group[0]])) for group in samples]
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None
        if len(sharing):
            tokens = [
                np.add.outer(starts[group], np.arange(shape[1])).ravel()
                for group, shape in zip(samples, self._shapes, strict=True)
            ]
            order = np.concatenate(tokens)
            there, back = to_device_together([order, order.argsort()], device)
            self._order = there, back

    def divide(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns groups of equally long samples, then the other samples, `[samples, length, ...]` each.

        Args:
            x: `[total_tokens, ...]`.
        """
        if self._order:
            x = permuted(x, *self._order)
        # `split`, not slices: its backward is one concatenation, but a slice's fills a tensor per sample.
        parts = x.split([samples * length for samples, length in self._shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins parts shaped like those of `divide` to `[total_tokens, ...]`; the inverse of `divide`."""
        x = torch.cat([part.flatten(0, 1) for part in parts])
        return permuted(x, *reversed(self._order)) if self._order else x


def permuted(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Returns `x[order]`; `inverse` is the inverse permutation."""
    return _Permuted.apply(x, order, inverse)


class _Permuted(torch.autograd.Function):
    """A permutation whose backward is the inverse one; `index_select`'s own scatter-add is slower."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
