"""Batches for all attention backends, and what plain masked attention computes for them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hstu.modules import SampleMask

SCALING_SEQLEN = 50.0
MAX_TOKENS = 100


def sees(mask: SampleMask, row: int, column: int) -> bool:
    """Returns whether a row sees a column, by the rule for each pair of tokens."""
    if column >= mask.history_end:
        if row < mask.history_end:
            return False
        candidate_of = [(token - mask.history_end) // mask.tokens_per_candidate for token in (row, column)]
        return candidate_of[0] == candidate_of[1] and column <= row
    if row >= mask.history_end or not mask.is_causal:
        return True
    return column <= row or (row < mask.num_contextual and column < mask.num_contextual)


def dense_attention(
    qkv: Sequence[torch.Tensor], masks: Sequence[SampleMask], scaling_seqlen: float = SCALING_SEQLEN
) -> torch.Tensor:
    """Computes the attention of whole samples with one matrix of weights each."""
    out, start = [sum(x[:0] for x in qkv)], 0  # there may be no samples
    for mask in masks:
        tokens = range(mask.num_tokens)
        seen = torch.tensor([[float(sees(mask, row, column)) for column in tokens] for row in tokens])
        q, k, v = (x[start : start + mask.num_tokens] for x in qkv)
        scores = torch.einsum("rhd,chd->hrc", q, k) / math.sqrt(q.shape[-1])
        weights = scores * torch.sigmoid(scores) * seen.view(mask.num_tokens, mask.num_tokens).to(q.dtype)
        out.append(torch.einsum("hrc,chd->rhd", weights / scaling_seqlen, v))
        start += mask.num_tokens
    return torch.cat(out)


@dataclass(frozen=True)
class Case:
    """A batch.

    Attributes:
        masks: one per sample; at most MAX_TOKENS tokens in all.
        dtype, head_dim: of q, k and v.
        views: what they are views of: "projection" for one tensor, "copies" for three with different strides.
    """

    masks: tuple[SampleMask, ...]
    dtype: torch.dtype = torch.float32
    head_dim: int = 32
    views: str = "projection"

    def inputs(self) -> list[torch.Tensor]:
        """Returns q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.head_dim)
        shape = sum(mask.num_tokens for mask in self.masks), 4, 2, self.head_dim
        q, k, v, grad_out = torch.randn(shape, generator=generator).to(self.dtype).unbind(1)
        if self.views == "copies":
            q, k = q.contiguous(), k.mT.contiguous().mT
        return [x.requires_grad_() for x in (q, k, v)] + [grad_out]

    def expected(self) -> list[torch.Tensor]:
        """Returns the output and the gradients of q, k and v, in float32."""
        *qkv, grad_out = (x.detach().float() for x in self.inputs())
        qkv = [x.requires_grad_() for x in qkv]
        out = dense_attention(qkv, self.masks)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


def mask(
    contextual: int, history: int, targets: int = 0, tokens: int = 2, is_causal: bool = True
) -> SampleMask:
    """Returns the mask of a sample with these numbers of tokens, and `tokens` of each target."""
    history_end = contextual + history
    return SampleMask(history_end + tokens * targets, contextual, history_end, tokens, is_causal)


def drawn_masks(seed: int) -> tuple[SampleMask, ...]:
    """Returns samples of any kind, empty ones among them, with MAX_TOKENS tokens at most."""
    generator = random.Random(seed)
    tokens, is_causal = 1 + seed % 2, seed % 3 > 0
    masks: list[SampleMask] = []
    left = MAX_TOKENS
    for _ in range(5):
        contextual = generator.choice([0, 3, 20])
        targets = generator.choice([0, 1, 5, 10])
        history = generator.choice([0, 1, 17, 40])
        one = mask(contextual, history, targets, tokens, is_causal)
        if one.num_tokens <= left:
            masks.append(one)
            left -= one.num_tokens
    return tuple(masks)


MIXED = (mask(3, 11, 2), mask(0, 0), mask(17, 4), mask(0, 1), mask(0, 2, 8))
WIDTHS = {torch.float32: (40, 128, 256), torch.bfloat16: (32, 64, 256), torch.float16: (96, 256)}
# Those that the CUTLASS kernels can compute, too.
CAUSAL = {
    "history": (mask(0, 9), mask(0, 1), mask(0, 33)),
    "candidates of two tokens": (mask(0, 9, 3), mask(0, 0), mask(0, 5), mask(0, 0, 2)),
    "candidates of one token": (mask(0, 9, 3, tokens=1), mask(0, 0, 5, tokens=1)),
    "one contextual token": (mask(1, 9, 3), mask(1, 0)),
    "no tokens": (mask(0, 0), mask(0, 0)),
}
CASES = {
    **{f"drawn {seed}": Case(drawn_masks(seed)) for seed in range(4)},
    "long": Case((mask(20, 41, 19),)),
    "long targets of one token": Case((mask(0, 50, 50, tokens=1),)),
    "long, not causal": Case((mask(20, 41, 19, is_causal=False),)),
    "whole tiles": Case((mask(16, 16, 8), mask(0, 32), mask(0, 0, 8))),
    "empty": Case((mask(0, 0), mask(0, 0))),
    "no samples": Case(()),
    "different strides": Case(MIXED, views="copies"),
    **{
        f"{str(dtype)[6:]}, width {width}": Case(MIXED, dtype, width)
        for dtype, widths in WIDTHS.items()
        for width in widths
    },
}
CAUSAL_CASES = {
    f"{name}, {str(dtype)[6:]}": Case(masks, dtype)
    for name, masks in CAUSAL.items()
    for dtype in (torch.bfloat16, torch.float16)
}
