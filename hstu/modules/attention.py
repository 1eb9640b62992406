"""HSTU attention over jagged sequences; the cost is the sum of the squared lengths.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hstu.modules.attention_mask import SampleMask

# Size of the scores of one block of query rows. On CPU they stay in the core's own cache between the matrix
# products, so processes on neighboring cores do not contend for memory. On CUDA a block is mostly one sample.
CPU_BLOCK_BYTES = 2 << 20
CUDA_BLOCK_BYTES = 1 << 28


def jagged_hstu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[SampleMask], scaling_seqlen: float
) -> torch.Tensor:
    """Computes `SiLU(q kᵀ / sqrt(head_dim)) / scaling_seqlen`, masked, times v, for each sample.

    The masked half is computed too, so a sample of T tokens takes `4 T² num_heads head_dim` FLOPs, as
    `HSTUFlops` counts. The T × T scores are never stored: the backward pass recomputes blocks of them.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each; samples are concatenated.
        masks: one per sample, with its number of tokens.
        scaling_seqlen: constant of the model. A value taken from the batch, such as its longest sequence,
            would make a sample's result depend on the samples it is batched with.

    Returns:
        `[total_tokens, num_heads, head_dim]`.

    Raises:
        ValueError: shapes differ, the masks' tokens do not add up, or `scaling_seqlen` is not positive.
    """
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must have one shape [total_tokens, num_heads, head_dim]; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    num_tokens = sum(mask.num_tokens for mask in masks)
    if num_tokens != q.shape[0]:
        raise ValueError(f"the masks have {num_tokens} tokens, but q, k and v have {q.shape[0]}")
    if not scaling_seqlen > 0:
        raise ValueError(f"scaling_seqlen is {scaling_seqlen}; expected a positive constant")
    return _JaggedHSTUAttention.apply(q, k, v, masks, scaling_seqlen)


class _JaggedHSTUAttention(torch.autograd.Function):
    """Blockwise attention. Name suffixes: H heads, b query rows of a block, T tokens of a sample, D head_dim.

    Constant factors go into the small tensors instead of the scores. The division by N = scaling_seqlen is
    split into a factor of 1/sqrt(N) before the products and one after them: unscaled sums over T tokens
    overflow float16, and terms scaled by all of 1/N underflow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        masks: Sequence[SampleMask],
        scaling_seqlen: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.masks, ctx.scaling_seqlen = masks, scaling_seqlen
        out = torch.empty_like(q)
        half_scale = 1 / math.sqrt(scaling_seqlen)
        scaled_q, scaled_v = q * (1 / math.sqrt(q.shape[-1])), v * half_scale
        for mask, (q_HTD, k_HTD, v_HTD, out_HTD) in _samples(masks, scaled_q, k, scaled_v, out):
            for block in _row_blocks(q_HTD):
                weights_HbT = torch.bmm(q_HTD[:, block], k_HTD.mT)
                torch.nn.functional.silu(weights_HbT, inplace=True)
                _hide(mask, block, weights_HbT)
                out_HTD[:, block] = torch.bmm(weights_HbT, v_HTD)
        return out.mul_(half_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        scale, half_scale = 1 / math.sqrt(q.shape[-1]), 1 / math.sqrt(ctx.scaling_seqlen)
        scaled_q, scaled_grad = q * scale, grad_out * half_scale
        # Blocks add up in float32, because one rounding per block would show in 16-bit types.
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(q, dtype=sum_dtype) for _ in range(2))
        for mask, (q_HTD, k_HTD, v_HTD, go_HTD, gq_HTD, gk_HTD, gv_HTD) in _samples(
            ctx.masks, scaled_q, k, v, scaled_grad, grad_q, grad_k, grad_v
        ):
            for block in _row_blocks(q_HTD):
                q_HbD, go_HbD = q_HTD[:, block], go_HTD[:, block]
                scores_HbT = torch.bmm(q_HbD, k_HTD.mT)
                grad_HbT = torch.bmm(go_HbD, v_HTD.mT)
                torch.ops.aten.silu_backward.grad_input(grad_HbT, scores_HbT, grad_input=grad_HbT)
                weights_HbT = torch.nn.functional.silu(scores_HbT, inplace=True)
                _hide(mask, block, grad_HbT, weights_HbT)
                gq_HTD[:, block] = torch.bmm(grad_HbT, k_HTD)
                gk_HTD += torch.bmm(grad_HbT.mT, q_HbD)
                gv_HTD += torch.bmm(weights_HbT.mT, go_HbD)
        grad_q.mul_(scale * half_scale)
        grad_k.mul_(half_scale)
        grad_v.mul_(half_scale)
        return grad_q, grad_k.to(q.dtype), grad_v.to(q.dtype), None, None


def _samples(
    masks: Sequence[SampleMask], *tensors: torch.Tensor
) -> Iterator[tuple[SampleMask, list[torch.Tensor]]]:
    """Yields the mask of each nonempty sample, and its part of each tensor as `[H, T, D]`."""
    start = 0
    for mask in masks:
        end = start + mask.num_tokens
        if mask.num_tokens:
            yield mask, [tensor[start:end].transpose(0, 1) for tensor in tensors]
        start = end


def _row_blocks(q_HTD: torch.Tensor) -> Iterator[slice]:
    """Yields blocks of query rows of nearly equal size, whose scores against all T keys fit the budget."""
    num_heads, num_tokens, _ = q_HTD.shape
    budget = CUDA_BLOCK_BYTES if q_HTD.is_cuda else CPU_BLOCK_BYTES
    row_bytes = num_heads * num_tokens * q_HTD.element_size()
    num_blocks = math.ceil(num_tokens * row_bytes / budget)
    rows = math.ceil(num_tokens / num_blocks)
    for first in range(0, num_tokens, rows):
        yield slice(first, min(first + rows, num_tokens))


def _hide(mask: SampleMask, block: slice, *blocks_HbT: torch.Tensor) -> None:
    """Zeroes, in place, the scores that the block's query rows do not see."""
    first_column, visible_bC = mask.visible(block.start, block.stop, blocks_HbT[0].device)
    visible_bC = visible_bC.to(blocks_HbT[0].dtype)  # multiplying by floats is much faster than masked_fill_
    for block_HbT in blocks_HbT:
        block_HbT[:, :, first_column:].mul_(visible_bC)
