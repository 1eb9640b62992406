"""HSTU attention over jagged sequences; the cost is the sum of the squared lengths.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hstu.modules.attention_tiles import AttentionTiles


def jagged_hstu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: AttentionTiles, scaling_seqlen: float
) -> torch.Tensor:
    """Computes `SiLU(q kᵀ / sqrt(head_dim)) / scaling_seqlen`, masked, times v, for each sample.

    Tiles that no row sees are left out, so that a sample takes the FLOPs that `HSTUFlops` counts. The T × T
    scores are never stored: the backward pass recomputes rows of tiles.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each; samples are concatenated.
        tiles: the samples, made once per batch.
        scaling_seqlen: constant of the model. A value taken from the batch, such as its longest sequence,
            would make a sample's result depend on the samples it is batched with.

    Returns:
        `[total_tokens, num_heads, head_dim]`.

    Raises:
        ValueError: shapes differ, the samples' tokens do not add up, or `scaling_seqlen` is not positive.
    """
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must have one shape [total_tokens, num_heads, head_dim]; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if tiles.num_tokens != q.shape[0]:
        raise ValueError(f"the masks have {tiles.num_tokens} tokens, but q, k and v have {q.shape[0]}")
    if not scaling_seqlen > 0:
        raise ValueError(f"scaling_seqlen is {scaling_seqlen}; expected a positive constant")
    return _JaggedHSTUAttention.apply(q, k, v, tiles, scaling_seqlen)


class _JaggedHSTUAttention(torch.autograd.Function):
    """Attention in rows of tiles.

    Name suffixes: P samples × heads of a chunk, b query rows of a block, c columns that they see, L tokens of
    a sample padded to whole tiles, D head_dim.

    Products take constant factors along, before they are rounded. In 16-bit types, sums over T tokens would
    overflow without the division by N = scaling_seqlen, and their gradients underflow with all of it at once:
    those of the weights are divided by sqrt(N), and what is made of them once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: AttentionTiles,
        scaling_seqlen: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.tiles, ctx.scaling_seqlen = tiles, scaling_seqlen
        scale = 1 / math.sqrt(q.shape[-1])
        out = _with_one_more(q)
        scores = _Scores(q)
        for chunk in tiles.chunks(q.shape[1]):
            q_PLD, k_PLD, v_PLD = (chunk.gathered(x) for x in (q, k, v))
            for first, last, columns, visible in chunk.row_blocks():
                weights_Pbc = scores.of(0, q_PLD, last - first, columns)
                _product(q_PLD[:, first:last], k_PLD[:, :columns].mT, scale, weights_Pbc)
                torch.nn.functional.silu(weights_Pbc, inplace=True)
                _hide(visible, len(chunk.masks), weights_Pbc)
                # Nothing reads these queries any more: their place takes the result.
                _product(weights_Pbc, v_PLD[:, :columns], 1 / scaling_seqlen, q_PLD[:, first:last])
            chunk.put(q_PLD, out)
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        scale, half_scale = 1 / math.sqrt(q.shape[-1]), 1 / math.sqrt(ctx.scaling_seqlen)
        grad_q, grad_k, grad_v = (_with_one_more(x) for x in (q, k, v))
        scores = _Scores(q)
        for chunk in ctx.tiles.chunks(q.shape[1]):
            q_PLD, k_PLD, v_PLD, go_PLD = (chunk.gathered(x) for x in (q, k, v, grad_out))
            # Blocks add up in float32, because one rounding per block would show in 16-bit types.
            sum_dtype = torch.promote_types(q.dtype, torch.float32)
            gk_PLD, gv_PLD = (torch.zeros_like(x, dtype=sum_dtype) for x in (k_PLD, v_PLD))
            for first, last, columns, visible in chunk.row_blocks():
                q_PbD, go_PbD = q_PLD[:, first:last], go_PLD[:, first:last]
                k_PcD, v_PcD = k_PLD[:, :columns], v_PLD[:, :columns]
                weights_Pbc = scores.of(0, q_PLD, last - first, columns)
                grad_Pbc = scores.of(1, q_PLD, last - first, columns)
                _product(q_PbD, k_PcD.mT, scale, weights_Pbc)
                _product(go_PbD, v_PcD.mT, half_scale, grad_Pbc)
                torch.ops.aten.silu_backward.grad_input(grad_Pbc, weights_Pbc, grad_input=grad_Pbc)
                torch.nn.functional.silu(weights_Pbc, inplace=True)
                _hide(visible, len(chunk.masks), grad_Pbc, weights_Pbc)
                _add_product(grad_Pbc.mT, q_PbD, scale * half_scale, gk_PLD[:, :columns])
                _add_product(weights_Pbc.mT, go_PbD, half_scale**2, gv_PLD[:, :columns])
                _product(grad_Pbc, k_PcD, scale * half_scale, q_PbD)
            for grad, grad_PLD in ((grad_q, q_PLD), (grad_k, gk_PLD), (grad_v, gv_PLD)):
                chunk.put(grad_PLD, grad)
        return grad_q[:-1], grad_k[:-1], grad_v[:-1], None, None


class _Scores:
    """Memory for blocks of scores, used again from block to block.

    Args:
        like: gives dtype and device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._memory = [like.new_empty(0), like.new_empty(0)]

    def of(self, number: int, x_PLD: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Returns uninitialized memory, `[P, rows, columns]`, of which there are two, 0 and 1."""
        size = len(x_PLD) * rows * columns
        if self._memory[number].numel() < size:
            self._memory[number] = x_PLD.new_empty(size)
        return self._memory[number][:size].view(len(x_PLD), rows, columns)


def _with_one_more(x: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor like `x` with one more token, which takes the results of padding."""
    return x.new_empty((len(x) + 1, *x.shape[1:]))


def _product(left: torch.Tensor, right: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Writes `factor · left @ right` to `out`."""
    torch.baddbmm(out, left, right, beta=0, alpha=factor, out=out)  # with beta=0 `out` is not read


def _add_product(left: torch.Tensor, right: torch.Tensor, factor: float, sums: torch.Tensor) -> None:
    """Adds `factor · left @ right` to `sums`."""
    if sums.dtype == left.dtype:
        torch.baddbmm(sums, left, right, alpha=factor, out=sums)
    else:
        sums.add_(torch.bmm(left, right), alpha=factor)


def _hide(visible: torch.Tensor | None, num_samples: int, *blocks_Pbc: torch.Tensor) -> None:
    """Zeroes, in place, the scores that the block's query rows do not see."""
    for block_Pbc in blocks_Pbc:
        if visible is None:
            block_Pbc[:, :, -block_Pbc.shape[1] :].tril_()
        else:
            hidden = block_Pbc[:, :, block_Pbc.shape[2] - visible.shape[3] :]
            hidden.unflatten(0, (num_samples, -1)).mul_(visible.to(block_Pbc.dtype))
