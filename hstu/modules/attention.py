"""HSTU attention over jagged sequences; the cost is the sum of the squared lengths.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hstu.modules.attention_inputs import check_inputs
from hstu.modules.attention_tiles import AttentionTiles

# Into a tensor that is not contiguous, PyTorch multiplies on a CPU matrix by matrix. For fewer than these,
# that is faster than a product of its own, which is then added.
FEW_MATRICES = 8


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
    check_inputs(q, k, v, tiles.num_tokens, scaling_seqlen)
    return _JaggedHSTUAttention.apply(q, k, v, tiles, scaling_seqlen)


class _JaggedHSTUAttention(torch.autograd.Function):
    """Attention in rows of tiles forward, and in columns of tiles backward, where each output is done once.

    Name suffixes: P samples × heads of a chunk, b tokens of a block, s tokens that its scores are with, L
    tokens of a sample padded to whole tiles, D head_dim.

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
        memory = _Memory(q)
        for chunk in tiles.chunks(*q.shape[1:]):
            P, L, D = chunk.num_heads, chunk.num_tokens, q.shape[2]
            k_PLD = chunk.gather(k, memory.block("k", P, L, D))
            v_PLD = chunk.gather(v, memory.block("v", P, L, D))
            for first, last, columns, visible in chunk.row_blocks():
                q_PbD = chunk.gather(q, memory.block("q", P, last - first, D), first)
                weights_Pbs = memory.block("weights", P, last - first, columns)
                _product(q_PbD, k_PLD[:, :columns].mT, scale, weights_Pbs)
                torch.nn.functional.silu(weights_Pbs, inplace=True)
                if visible is None:
                    weights_Pbs[:, :, first:].tril_()
                else:
                    _hide(visible, weights_Pbs[:, :, columns - visible.shape[3] :])
                # Nothing reads these queries any more: their place takes the result.
                _product(weights_Pbs, v_PLD[:, :columns], 1 / scaling_seqlen, q_PbD)
                chunk.put(q_PbD, out, first)
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        scale, half_scale = 1 / math.sqrt(q.shape[-1]), 1 / math.sqrt(ctx.scaling_seqlen)
        grad_q, grad_k, grad_v = (_with_one_more(x) for x in (q, k, v))
        memory, sums = _Memory(q), _Memory(q, torch.promote_types(q.dtype, torch.float32))
        for chunk in ctx.tiles.chunks(*q.shape[1:]):
            P, L, D = chunk.num_heads, chunk.num_tokens, q.shape[2]
            q_PLD = chunk.gather(q, memory.block("q", P, L, D))
            go_PLD = chunk.gather(grad_out, memory.block("grad_out", P, L, D))
            # Blocks add up in float32, because one rounding per block would show in 16-bit types.
            gq_PLD = sums.block("grad_q", P, L, D).zero_()
            for first, last, first_row, visible in chunk.column_blocks():
                k_PbD = chunk.gather(k, memory.block("k", P, last - first, D), first)
                v_PbD = chunk.gather(v, memory.block("v", P, last - first, D), first)
                q_PsD, go_PsD = q_PLD[:, first_row:], go_PLD[:, first_row:]
                weights_Pbs = memory.block("weights", P, last - first, L - first_row)
                grad_Pbs = memory.block("grad_weights", *weights_Pbs.shape)
                _product(k_PbD, q_PsD.mT, scale, weights_Pbs)
                _product(v_PbD, go_PsD.mT, half_scale, grad_Pbs)
                torch.ops.aten.silu_backward.grad_input(grad_Pbs, weights_Pbs, grad_input=grad_Pbs)
                torch.nn.functional.silu(weights_Pbs, inplace=True)
                for block_Pbs in (grad_Pbs, weights_Pbs):
                    if visible is None:
                        block_Pbs[:, :, : last - first].triu_()
                    else:
                        _hide(visible, block_Pbs[:, :, : visible.shape[3]])
                memory.add_product(grad_Pbs.mT, k_PbD, scale * half_scale, gq_PLD[:, first_row:])
                # Nothing reads these keys and values any more: their place takes the gradients.
                _product(grad_Pbs, q_PsD, scale * half_scale, k_PbD)
                _product(weights_Pbs, go_PsD, half_scale**2, v_PbD)
                chunk.put(k_PbD, grad_k, first)
                chunk.put(v_PbD, grad_v, first)
            chunk.put(gq_PLD, grad_q)
        return grad_q[:-1], grad_k[:-1], grad_v[:-1], None, None


class _Memory:
    """Memory for blocks, used again from block to block.

    Args:
        like: gives the device.
        dtype: of the blocks; None for that of `like`.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._empty = like.new_empty(0, dtype=dtype)
        self._memory: dict[str, torch.Tensor] = {}

    def block(self, name: str, *shape: int) -> torch.Tensor:
        """Returns uninitialized memory of a shape; a later block of that name overwrites it."""
        size = math.prod(shape)
        memory = self._memory.get(name, self._empty)
        if memory.numel() < size:
            memory = self._memory[name] = self._empty.new_empty(size)
        return memory[:size].view(shape)

    def add_product(self, left: torch.Tensor, right: torch.Tensor, factor: float, sums: torch.Tensor) -> None:
        """Adds `factor · left @ right` to `sums`."""
        if sums.dtype == left.dtype and (sums.is_contiguous() or sums.shape[0] < FEW_MATRICES):
            torch.baddbmm(sums, left, right, alpha=factor, out=sums)
        else:
            product = self.block("product", *sums.shape)
            sums.add_(torch.bmm(left, right, out=product), alpha=factor)


def _with_one_more(x: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor like `x` with one more token, which takes the results of padding."""
    return x.new_empty((len(x) + 1, *x.shape[1:]))


def _product(left: torch.Tensor, right: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Writes `factor · left @ right` to `out`."""
    torch.baddbmm(out, left, right, beta=0, alpha=factor, out=out)  # with beta=0 `out` is not read


def _hide(visible: torch.Tensor, block_Pbs: torch.Tensor) -> None:
    """Zeroes, in place, the scores of a block that are not visible, `[samples, 1, b, s]`."""
    block_Pbs.unflatten(0, (visible.shape[0], -1)).mul_(visible.to(block_Pbs.dtype))
