"""HSTU attention over jagged sequences on CUDA, by Triton kernels.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hstu.modules.attention_inputs import check_fetched, check_inputs
from hstu.modules.triton_compiler import warn_of_wrong_code
from hstu.modules.triton_tiles import (
    INTERPRETER,
    MAX_HEAD_DIM,
    KernelTiles,
    TileShape,
    tiles_of,
)
from hstu.modules.triton_work import TritonWork

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    work: TritonWork,
    scaling_seqlen: float,
    fetched: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `SiLU(q kᵀ / sqrt(head_dim)) / scaling_seqlen`, masked, times v, for each sample.

    Equals `jagged_hstu_attention`, in one kernel forward and two backward (three for head_dim above 128, or
    above 64 in float32). Masked tiles are skipped, scores are never stored, and host and device do not
    synchronize. Sums are float32. A float32 product is three TF32 products. Results are deterministic.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each, all bfloat16, float16, or float32. They may be
            views of one projection. head_dim is at most 256, and is padded to a power of two.
        work: masks of the batch's samples, and the work lists made from them.
        scaling_seqlen: constant of the model.
        fetched: keys and values that pieces of samples see in addition to k and v, `[num_fetched, 2,
            num_heads, head_dim]`; None for whole samples.

    Returns:
        The results, `[total_tokens, num_heads, head_dim]`, contiguous, with the inputs' dtype, and zero for
        tokens that are not queries.

    Raises:
        ImportError: triton is not installed.
        ValueError: shapes, dtypes, or devices do not fit, or `scaling_seqlen` is not positive.
    """
    check_inputs(q, k, v, work.end, scaling_seqlen, work.has_holes)
    if fetched is not None and work.run is not None:
        check_fetched(k, fetched, work.run.end)
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {q.shape[2]}; expected 1 to {MAX_HEAD_DIM} for the Triton kernels")
    if q.dtype not in DTYPES or len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise ValueError(
            "q, k and v must be on one device, and all bfloat16, float16 or float32; got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    if not q.is_cuda and not _kernels().INTERPRETED.value:
        raise ValueError(f"q, k and v are on {q.device}; the Triton kernels need CUDA")
    return _TritonHSTUAttention.apply(q, k, v, fetched, work, scaling_seqlen)


class _TritonHSTUAttention(torch.autograd.Function):
    """Launches the kernels. They compute half scores x/2, because SiLU(x) = x/2 (1 + tanh(x/2))."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fetched: torch.Tensor | None,
        work: TritonWork,
        scaling_seqlen: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, fetched)  # the keys of pieces are gathered again in backward
        ctx.work, ctx.scaling_seqlen = work, scaling_seqlen
        q, k, v = _kernel_inputs(q, k, v, fetched, work)
        out = _new(q, work.has_holes)
        tiles = _tiles(q)
        items, _, _ = _lists(work, q.device, tiles)
        _launch(_kernels().forward_kernel, tiles.forward, [q, k, v, out], items, 1 / scaling_seqlen)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, fetched = ctx.saved_tensors
        work = ctx.work
        tiles = _tiles(q)
        _, items_q, items_kv = _lists(work, q.device, tiles)
        if work.has_holes and not len(items_q):
            # Gradients that are all zero would waste memory.
            return None, None, None, None if fetched is None else torch.zeros_like(fetched), None, None
        q, k, v = _kernel_inputs(q, k, v, fetched, work)
        grad_out = grad_out.contiguous()
        # Every key of a piece is in some block of columns. Keys of whole samples have the queries' holes.
        grad_q, grad_k, grad_v = (_new(x, work.has_holes and (x is q or fetched is None)) for x in (q, k, v))
        # Gradients of scores are cast to the inputs' dtype. Dividing by sqrt(scaling_seqlen) before the cast
        # and again after the sum keeps float16 from overflowing or underflowing.
        before = 1 / math.sqrt(ctx.scaling_seqlen)
        after = 0.5 / math.sqrt(q.shape[2]) / math.sqrt(ctx.scaling_seqlen)
        inputs = [q, k, v, grad_out]
        _launch(_kernels().grad_q_kernel, tiles.grad_q, [*inputs, grad_q], items_q, before, after)
        scales = before, after, 1 / ctx.scaling_seqlen
        outputs = [grad_k, grad_v]
        for flags in tiles.grad_kv_passes:
            _launch(_kernels().grad_kv_kernel, tiles.grad_kv, [*inputs, *outputs], items_kv, *scales, **flags)
        if fetched is None or work.run is None:
            return grad_q, grad_k, grad_v, None, None, None
        grads, grad_fetched = (torch.zeros_like(grad_q), torch.zeros_like(grad_q)), torch.zeros_like(fetched)
        for place, (own, grad) in enumerate(zip(grads, outputs, strict=True)):
            work.run.add(grad, own, grad_fetched[:, place])
        return grad_q, *grads, grad_fetched, None, None


def _kernel_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor | None, work: TritonWork
) -> Sequence[torch.Tensor]:
    """Returns queries, keys, and values as the kernels take them. The keys of pieces are gathered first."""
    if fetched is not None and work.run is not None:
        k, v = work.run.gather(k, fetched[:, 0]), work.run.gather(v, fetched[:, 1])
    return *_with_equal_strides(q), *_with_equal_strides(k, v)


def _new(like: torch.Tensor, zero: bool) -> torch.Tensor:
    """Returns a contiguous tensor like another, of zeros or uninitialized."""
    new = torch.zeros if zero else torch.empty
    return new(like.shape, dtype=like.dtype, device=like.device)


def _kernels() -> ModuleType:
    try:
        from hstu.modules import triton_kernels
    except ImportError as error:
        raise ImportError(
            "triton_hstu_attention needs the package triton. CUDA builds of torch install it; "
            "with other builds: pip install triton"
        ) from error
    return triton_kernels


def _tiles(q: torch.Tensor) -> KernelTiles:
    chip = INTERPRETER
    if q.is_cuda:
        chip = torch.cuda.get_device_capability(q.device)
        warn_of_wrong_code(chip)
    return tiles_of(q.shape[2], q.dtype, chip)


def _lists(work: TritonWork, device: torch.device, tiles: KernelTiles) -> list[torch.Tensor]:
    return work.lists(device, by_rows=(tiles.forward, tiles.grad_q), by_columns=(tiles.grad_kv,))


def _with_equal_strides(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the tensors if their strides agree and the last stride is 1, else contiguous copies."""
    if len({x.stride() for x in tensors}) == 1 and tensors[0].stride(2) == 1:
        return tensors
    return [x.contiguous() for x in tensors]


def _launch(
    kernel: Any,
    tile: TileShape,
    tensors: Sequence[torch.Tensor],
    items: torch.Tensor,
    *scales: float,
    **flags: bool,
) -> None:
    q, k = tensors[:2]
    _, num_heads, head_dim = q.shape
    constants = tile.constants(head_dim) | flags
    strides = *q.stride()[:2], *k.stride()[:2]
    half_scale = 0.5 / math.sqrt(head_dim)
    with torch.cuda.device_of(q):
        kernel[(len(items) * num_heads,)](
            *tensors, items, *strides, num_heads, half_scale, *scales, **constants, **tile.options()
        )
