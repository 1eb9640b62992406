"""Batches for all attention backends, and what plain masked attention computes for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

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


def visible(mask: SampleMask) -> torch.Tensor:
    """Returns which tokens each token of a whole sample sees, bool `[num_tokens, num_tokens]`."""
    tokens = range(mask.num_tokens)
    seen = [sees(mask, row, column) for row in tokens for column in tokens]
    return torch.tensor(seen, dtype=torch.bool).view(mask.num_tokens, mask.num_tokens)


def dense_attention(
    qkv: Sequence[torch.Tensor], masks: Sequence[SampleMask], scaling_seqlen: float = SCALING_SEQLEN
) -> torch.Tensor:
    """Computes the attention of whole samples with one matrix of weights each."""
    out, start = [sum(x[:0] for x in qkv)], 0  # there may be no samples
    for mask in masks:
        q, k, v = (x[start : start + mask.num_tokens] for x in qkv)
        scores = torch.einsum("rhd,chd->hrc", q, k) / math.sqrt(q.shape[-1])
        weights = scores * torch.sigmoid(scores) * visible(mask)
        out.append(torch.einsum("hrc,chd->rhd", weights / scaling_seqlen, v))
        start += mask.num_tokens
    return torch.cat(out)


@dataclass(frozen=True)
class Case:
    """A batch; with `are_copies`, q, k and v have different strides, and are no views of one projection."""

    masks: tuple[SampleMask, ...]
    dtype: torch.dtype = torch.float32
    head_dim: int = 32
    are_copies: bool = False

    def inputs(self) -> list[torch.Tensor]:
        """Returns q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.head_dim)
        shape = sum(mask.num_tokens for mask in self.masks), 4, 2, self.head_dim
        q, k, v, grad_out = torch.randn(shape, generator=generator).to(self.dtype).unbind(1)
        if self.are_copies:
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


@st.composite
def batches(draw: st.DrawFn) -> list[SampleMask]:
    """Draws samples of a model; contextual tokens may be causal, too."""
    tokens, is_causal, sees_all = draw(st.tuples(st.integers(1, 2), st.booleans(), st.booleans()))
    numbers = st.tuples(
        st.sampled_from([0, 1, 3, 33]),
        st.one_of(st.integers(0, 9), st.integers(28, 70)),
        st.integers(0, 3),
    )
    samples = draw(st.lists(numbers, min_size=1, max_size=4))
    masks = [mask(*of_sample, tokens, is_causal) for of_sample in samples]
    return [each if sees_all else replace(each, num_contextual=0) for each in masks]


MIXED = (mask(3, 11, 2), mask(0, 0), mask(17, 4), mask(0, 1), mask(0, 2, 8))
FEW = (mask(3, 11, 2), mask(0, 0), mask(0, 1))
WIDTHS = ((torch.float32, 40), (torch.float32, 256), (torch.bfloat16, 64), (torch.float16, 96))
# Contextual and history tokens are causal.
CAUSAL = {
    "history": (mask(0, 9), mask(0, 1), mask(0, 33)),
    "candidates of two tokens": (mask(0, 9, 3), mask(0, 0), mask(0, 5), mask(0, 0, 2)),
    "candidates of one token": (mask(0, 9, 3, tokens=1), mask(0, 0, 5, tokens=1)),
    "one contextual token": (mask(1, 9, 3), mask(1, 0)),
    "no tokens": (mask(0, 0), mask(0, 0)),
}
CASES = {
    "mixed": Case(MIXED),
    "mixed, not causal": Case(tuple(replace(one, is_causal=False) for one in MIXED)),
    "long": Case((mask(20, 41, 19),)),
    "long targets of one token": Case((mask(0, 50, 50, tokens=1),)),
    "long, not causal": Case((mask(20, 41, 19, is_causal=False),)),
    "whole tiles": Case((mask(16, 16, 8), mask(0, 32), mask(0, 0, 8))),
    "empty": Case((mask(0, 0), mask(0, 0))),
    "no samples": Case(()),
    "different strides": Case(FEW, are_copies=True),
    **{f"{str(dtype)[6:]}, width {width}": Case(FEW, dtype, width) for dtype, width in WIDTHS},
}
CAUSAL_CASES = {
    f"{name}, {str(dtype)[6:]}": Case(masks, dtype)
    for name, masks in CAUSAL.items()
    for dtype in (torch.bfloat16, torch.float16)
}
