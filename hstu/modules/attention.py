"""HSTU attention over jagged sequences; the cost is the sum of the squared lengths.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hstu.modules.attention_inputs import check_fetched, check_inputs
from hstu.modules.attention_tiles import AttentionTiles, Chunk, Place

# Below this many matrices, PyTorch on a CPU loses nothing by multiplying into a strided output.
FEW_MATRICES = 8


def jagged_hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: AttentionTiles,
    scaling_seqlen: float,
    fetched: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `SiLU(q kᵀ / sqrt(head_dim)) / scaling_seqlen`, masked, times v, for each sample.

    Tiles that no row sees are skipped, so that on a CPU a sample takes the FLOPs that `HSTUFlops` counts.
    The T × T scores are never stored: the backward pass recomputes them tile by tile.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each; samples are concatenated.
        tiles: tiles of the samples, made once per batch.
        scaling_seqlen: constant of the model. A value taken from the batch, such as its longest sequence,
            would make a sample's result depend on the samples it is batched with.
        fetched: keys and values that pieces of samples see in addition to k and v, `[num_fetched, 2,
            num_heads, head_dim]`; None for whole samples.

    Returns:
        The results, `[total_tokens, num_heads, head_dim]`, zero for tokens that are not queries.

    Raises:
        ValueError: shapes differ, the samples' tokens do not add up, or `scaling_seqlen` is not positive.
    """
    check_inputs(q, k, v, tiles.end, scaling_seqlen, tiles.has_holes)
    if fetched is not None:
        check_fetched(k, fetched, tiles.num_locations)
    return _JaggedHSTUAttention.apply(q, k, v, fetched, tiles, scaling_seqlen)


class _JaggedHSTUAttention(torch.autograd.Function):
    """Runs forward by rows of tiles and backward by columns, so each gradient of k and v is written once.

    Name suffixes: P samples × heads of a chunk, b tokens of a block, s tokens they are scored against, L
    tokens of a sample padded to whole tiles, D head_dim.

    Products apply constant factors before rounding. In 16-bit types, sums over T tokens would overflow
    without the division by N = scaling_seqlen, and gradients would underflow if divided by all of N at once.
    So the gradients of the weights are divided by sqrt(N), and the products made from them by sqrt(N) again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fetched: torch.Tensor | None,
        tiles: AttentionTiles,
        scaling_seqlen: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, fetched)  # the keys of pieces are gathered again in backward
        ctx.tiles, ctx.scaling_seqlen = tiles, scaling_seqlen
        scale = 1 / math.sqrt(q.shape[-1])
        out = _with_one_more(q, tiles.has_holes)
        memory = _Memory(q)
        for chunk in tiles.chunks(*q.shape[1:]):
            seen_k, seen_v = _seen(chunk, k, v, fetched)
            queries = _Tokens("q", chunk.queries, q, memory, in_blocks=True)
            keys, values = _Tokens("k", chunk.keys, seen_k, memory), _Tokens("v", chunk.keys, seen_v, memory)
            results = _Results(queries, out)
            for first, last, columns, visible in chunk.row_blocks():
                weights_Pbs = memory.block("weights", queries.place.num_heads, last - first, columns)
                _product(queries.block(first, last), keys.block(0, columns).mT, scale, weights_Pbs)
                torch.nn.functional.silu(weights_Pbs, inplace=True)
                if visible is None:
                    weights_Pbs[:, :, first:].tril_()
                else:
                    _hide(visible, weights_Pbs[:, :, columns - visible.shape[3] :])
                results.put_product(first, weights_Pbs, values.block(0, columns), 1 / scaling_seqlen)
            results.put_copies()
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, fetched = ctx.saved_tensors
        if ctx.tiles.has_holes and not ctx.tiles.chunks(*q.shape[1:]):
            # Gradients that are all zero would waste memory.
            return None, None, None, None if fetched is None else torch.zeros_like(fetched), None, None
        grad_q, grad_k, grad_v = (_with_one_more(x, ctx.tiles.has_holes) for x in (q, k, v))
        grad_fetched = None if fetched is None else torch.zeros_like(fetched)
        memory, sums = _Memory(q), _Memory(q, torch.promote_types(q.dtype, torch.float32))
        for chunk in ctx.tiles.chunks(*q.shape[1:]):
            seen = _seen(chunk, k, v, fetched, copied=True)
            # A piece's gradients overwrite the copies of its keys, block by block, after these are read.
            grads = (grad_k, grad_v) if chunk.run is None else seen
            _backward(chunk, (q, *seen, grad_out), (grad_q, *grads), ctx.scaling_seqlen, memory, sums)
            if chunk.run is not None and grad_fetched is not None:
                for place, (grad, own) in enumerate(zip(grads, (grad_k, grad_v), strict=True)):
                    chunk.run.add(grad, own[:-1], grad_fetched[:, place], chunk.queries.heads)
        return grad_q[:-1], grad_k[:-1], grad_v[:-1], grad_fetched, None, None


def _seen(
    chunk: Chunk, k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor | None, copied: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tensors that hold a chunk's keys and values. For a piece, they are gathered first.

    With `copied`, the tensors of a piece are never views.
    """
    if chunk.run is None or fetched is None:
        return k, v
    heads = chunk.queries.heads
    seen_k, seen_v = (chunk.run.gather(x, fetched[:, place], heads, copied) for place, x in enumerate((k, v)))
    return seen_k, seen_v


def _backward(
    chunk: Chunk,
    inputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    scaling_seqlen: float,
    memory: _Memory,
    sums: _Memory,
) -> None:
    """Computes a chunk's part of the gradients `grads` of q, k, and v.

    Args:
        chunk: the chunk.
        inputs: q, k, v, and the gradient of the output.
        grads: destinations of the gradients, shaped like q, k, and v with one extra token. For a piece, its
            gathered k and v are themselves the destinations.
        scaling_seqlen: constant of the model.
        memory: memory for blocks.
        sums: memory for sums of blocks. The sums are at least float32, because in 16-bit types one rounding
            per block would show.
    """
    q, k, v, grad_out = inputs
    grad_q, grad_k, grad_v = grads
    scale, half_scale = 1 / math.sqrt(q.shape[-1]), 1 / math.sqrt(scaling_seqlen)
    rows, columns = chunk.queries, chunk.keys
    queries, grads_out = _Tokens("q", rows, q, memory), _Tokens("go", rows, grad_out, memory)
    keys, values = (_Tokens(name, columns, x, memory, in_blocks=True) for name, x in (("k", k), ("v", v)))
    grads_k, grads_v = _Results(keys, grad_k), _Results(values, grad_v)
    gq_PLD = sums.block("gq", rows.num_heads, rows.num_tokens, q.shape[2]).zero_()
    for first, last, first_row, visible in chunk.column_blocks():
        k_PbD, v_PbD = keys.block(first, last), values.block(first, last)
        q_PsD, go_PsD = queries.block(first_row, rows.end), grads_out.block(first_row, rows.end)
        weights_Pbs = memory.block("weights", rows.num_heads, last - first, rows.end - first_row)
        grad_Pbs = memory.block("grad_weights", rows.num_heads, last - first, rows.end - first_row)
        _product(k_PbD, q_PsD.mT, scale, weights_Pbs)
        _product(v_PbD, go_PsD.mT, half_scale, grad_Pbs)
        torch.ops.aten.silu_backward.grad_input(grad_Pbs, weights_Pbs, grad_input=grad_Pbs)
        torch.nn.functional.silu(weights_Pbs, inplace=True)
        for block_Pbs in (grad_Pbs, weights_Pbs):
            if visible is not None:
                _hide(visible, block_Pbs[:, :, : visible.shape[3]])
            elif first_row < last:
                block_Pbs[:, :, : last - first_row].triu_(first - first_row)
        memory.add_product(grad_Pbs.mT, k_PbD, scale * half_scale, gq_PLD[:, first_row - rows.first :])
        grads_k.put_product(first, grad_Pbs, q_PsD, scale * half_scale)
        grads_v.put_product(first, weights_Pbs, go_PsD, half_scale**2)
    rows.put(gq_PLD, grad_q, rows.first)
    grads_k.put_copies()
    grads_v.put_copies()


class _Memory:
    """Scratch buffers by name, reused across blocks.

    Args:
        like: tensor on the device of the blocks.
        dtype: dtype of the blocks. None means the dtype of `like`.
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

    def product(self, left: torch.Tensor, right: torch.Tensor, factor: float) -> torch.Tensor:
        """Returns `factor · left @ right`, which the next call overwrites."""
        product = self.block("product", *left.shape[:2], right.shape[2])
        _product(left, right, factor, product)
        return product

    def add_product(self, left: torch.Tensor, right: torch.Tensor, factor: float, sums: torch.Tensor) -> None:
        """Adds `factor · left @ right` to `sums`."""
        if sums.dtype == left.dtype and _multiplies_into(sums):
            torch.baddbmm(sums, left, right, alpha=factor, out=sums)
        else:
            sums.add_(self.product(left, right, factor))


class _Tokens:
    """The tokens of one tensor in a chunk: copies for several samples, a view for one sample.

    Args:
        name: name of the copies' memory.
        place: place of the tokens.
        x: `[total_tokens, H, D]`.
        memory: memory for copies.
        in_blocks: whether the tokens are read block by block. If so, only a block with padding is copied.
            Otherwise, any padding causes all tokens to be copied.

    Attributes:
        tokens: `[P, tokens, D]`, without padding if they are a view.
    """

    def __init__(
        self, name: str, place: Place, x: torch.Tensor, memory: _Memory, in_blocks: bool = False
    ) -> None:
        self.name, self.place, self.x, self.memory = name, place, x, memory
        view = place.view(x)
        if view is None or (not in_blocks and view.shape[1] < place.num_tokens):
            view = self._gathered(place.first, place.end)
        self.tokens = view

    def block(self, first: int, last: int) -> torch.Tensor:
        """Returns the tokens from `first` to `last`, exclusive, `[P, last - first, D]`."""
        if last - self.place.first <= self.tokens.shape[1]:
            return self.tokens[:, first - self.place.first : last - self.place.first]
        return self._gathered(first, last)

    def _gathered(self, first: int, last: int) -> torch.Tensor:
        copies = self.memory.block(self.name, self.place.num_heads, last - first, self.x.shape[2])
        return self.place.gather(self.x, copies, first)


class _Results:
    """Writes a chunk's results, either into `out` or over copied tokens that are no longer read.

    Args:
        replaced: tokens that the results may overwrite.
        out: destination of the results, `[total_tokens + 1, H, D]`.
    """

    def __init__(self, replaced: _Tokens, out: torch.Tensor) -> None:
        self._place, self._memory, self._out = replaced.place, replaced.memory, out
        view = self._place.view(out)
        self._copies = replaced.tokens if view is None else None
        self._tokens = replaced.tokens if view is None else view

    def put_product(self, first: int, left: torch.Tensor, right: torch.Tensor, factor: float) -> None:
        """Writes the results of the block from token `first` on: `factor · left @ right`, `[P, b, D]`."""
        start = first - self._place.first
        end = start + left.shape[1]
        if end > self._tokens.shape[1]:
            self._place.put(self._memory.product(left, right, factor), self._out, first)
            return
        tokens = self._tokens[:, start:end]
        if _multiplies_into(tokens):
            _product(left, right, factor, tokens)
        else:
            tokens.copy_(self._memory.product(left, right, factor))

    def put_copies(self) -> None:
        """Writes the results that are not in `out` yet."""
        if self._copies is not None:
            self._place.put(self._copies, self._out, self._place.first)


def _multiplies_into(out: torch.Tensor) -> bool:
    """Returns whether PyTorch multiplies faster into `out`, `[P, …]`, than into contiguous scratch memory.

    On a CPU, it multiplies into a noncontiguous tensor matrix by matrix.
    """
    return out.is_contiguous() or out.shape[0] < FEW_MATRICES


def _with_one_more(x: torch.Tensor, zero: bool = False) -> torch.Tensor:
    """Returns a tensor like `x`, uninitialized or zero, with one extra token for the results of padding."""
    shape = len(x) + 1, *x.shape[1:]
    return x.new_zeros(shape) if zero else x.new_empty(shape)


def _product(left: torch.Tensor, right: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Writes `factor · left @ right` to `out`."""
    torch.baddbmm(out, left, right, beta=0, alpha=factor, out=out)  # with beta=0 `out` is not read


def _hide(visible: torch.Tensor, block_Pbs: torch.Tensor) -> None:
    """Zeroes, in place, the scores of a block where `visible`, `[samples, 1, b, s]`, is 0."""
    block_Pbs.unflatten(0, (visible.shape[0], -1)).mul_(visible.to(block_Pbs.dtype))
