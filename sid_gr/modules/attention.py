"""Causal attention over jagged sequences; the cost is the sum of the squared lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention


class Attention(Protocol):
    """Attention of the decoder's layers."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the shape of q, `[tokens, num_heads, head_dim]`; k and v have `num_kv_heads` heads."""


class JaggedCausalAttention:
    """Causal scaled-dot-product attention within each sample.

    Runs one kernel per sample: nothing is padded, and PyTorch's causal kernels need no mask.

    Args:
        lengths: tokens of each sample, on the host; q, k and v concatenate the samples.
        keep: whether to keep keys and values, to extend the sequences later.

    Attributes:
        keys_values: keys and values of each layer that has run, if kept.
    """

    def __init__(self, lengths: Sequence[int], keep: bool = False) -> None:
        self._lengths = list(lengths)
        self._keep = keep
        self.keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the attention of all samples.

        Raises:
            ValueError: the lengths do not add up to the number of tokens.
        """
        if sum(self._lengths) != q.shape[0]:
            raise ValueError(f"the samples have {sum(self._lengths)} tokens, q, k and v {q.shape[0]}")
        if self._keep:
            self.keys_values.append((k, v))
        # `split` and not slices: its backward is one concatenation, a slice's fills a tensor per sample.
        samples = zip(*(tensor.split(self._lengths) for tensor in (q, k, v)), strict=True)
        outputs = [_of_one_sample(*sample) for sample in samples if len(sample[0])]
        return torch.cat(outputs) if outputs else q


def _of_one_sample(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    """Computes one sample: T tokens, H heads, D head_dim; k and v may have fewer heads."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_THD, k_THD, v_THD))
    grouped = k.shape[1] != q.shape[1]
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return attended.squeeze(0).transpose(0, 1)
