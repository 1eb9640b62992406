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

from hstu.modules.attention_inputs import check_inputs
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: TritonWork, scaling_seqlen: float
) -> torch.Tensor:
    """Computes `SiLU(q kᵀ / sqrt(head_dim)) / scaling_seqlen`, masked, times v, for each sample.

    Equals `jagged_hstu_attention`, in one kernel forward and two backward (three for head_dim above 128, or
    above 64 in float32). Masked tiles are skipped, scores are never stored, and host and device do not
    synchronize. Sums are float32; float32 products are three TF32 products. Results are deterministic.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each, all bfloat16, float16 or float32. They may be
            views of one projection. head_dim is at most 256; it is padded to a power of two.
        work: masks of the batch's samples.
        scaling_seqlen: constant of the model.

    Returns:
        `[total_tokens, num_heads, head_dim]`, contiguous, with the inputs' dtype.

    Raises:
        ImportError: triton is not installed.
        ValueError: shapes, dtypes or devices do not fit, or `scaling_seqlen` is not positive.
    """
    check_inputs(q, k, v, work.num_tokens, scaling_seqlen)
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {q.shape[2]}; expected 1 to {MAX_HEAD_DIM} for the Triton kernels")
    if q.dtype not in DTYPES or len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise ValueError(
            "q, k and v must be on one device, and all bfloat16, float16 or float32; got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    if not q.is_cuda and not _kernels().INTERPRETED.value:
        raise ValueError(f"q, k and v are on {q.device}; the Triton kernels need CUDA")
    return _TritonHSTUAttention.apply(q, k, v, work, scaling_seqlen)


class _TritonHSTUAttention(torch.autograd.Function):
    """Launches the kernels. They compute half scores x/2, because SiLU(x) = x/2 (1 + tanh(x/2))."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: TritonWork, scaling_seqlen: float
    ) -> torch.Tensor:
        q, k, v = _with_equal_strides(q, k, v)
        ctx.save_for_backward(q, k, v)
        ctx.work, ctx.scaling_seqlen = work, scaling_seqlen
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tiles = _tiles(q)
        items, _, _ = _lists(work, q.device, tiles)
        _launch(_kernels().forward_kernel, tiles.forward, [q, k, v, out], items, 1 / scaling_seqlen)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_q, grad_k, grad_v = (torch.empty_like(grad_out) for _ in range(3))
        tiles = _tiles(q)
        _, items_q, items_kv = _lists(ctx.work, q.device, tiles)
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
        return grad_q, grad_k, grad_v, None, None


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
    chip = torch.cuda.get_device_capability(q.device) if q.is_cuda else INTERPRETER
    return tiles_of(q.shape[2], q.dtype, chip)


def _lists(work: TritonWork, device: torch.device, tiles: KernelTiles) -> list[torch.Tensor]:
    return work.lists(device, by_rows=(tiles.forward, tiles.grad_q), by_columns=(tiles.grad_kv,))


def _with_equal_strides(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the tensors, contiguous unless their strides agree and the last one is 1."""
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
    q = tensors[0]
    _, num_heads, head_dim = q.shape
    constants = tile.constants(head_dim) | flags
    strides = q.stride(0), q.stride(1)
    half_scale = 0.5 / math.sqrt(head_dim)
    with torch.cuda.device_of(q):
        kernel[(len(items) * num_heads,)](
            *tensors, items, *strides, num_heads, half_scale, *scales, **constants, **tile.options()
        )
