"""The models' attention on one GPU, compared with the CPU in float64."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_check.parts import REPOSITORY, NotRun, no_synchronization

if TYPE_CHECKING:
    from hstu.modules.attention_mask import SampleMask

# Largest relative L2 error of the output, and of each gradient, against float64.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
LENGTHS = (1, 200, 0, 37, 513)
NUM_HEADS, HEAD_DIM = 2, 32
SCALING_SEQLEN = 512.0
# Head widths for which the Triton kernels run, by dtype.
TRITON_WIDTHS = {torch.bfloat16: (32, 64, 128, 256), torch.float16: (32, 64, 128, 256), torch.float32: (64,)}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (number of query heads, number of key and value heads, width of a head)
Heads = tuple[int, int, int]


def check_hstu(device: torch.device) -> str:
    """Runs HSTU's jagged attention forward and backward."""
    attention = _make_reference(LENGTHS)
    dtypes = (torch.float32, torch.bfloat16)
    errors = {dtype: _find_error(attention, attention, device, dtype) for dtype in dtypes}
    return f"output and gradients in {_check_errors(errors)} of float64"


def check_triton_hstu(device: torch.device, lengths: Sequence[int] = LENGTHS) -> str:
    """Runs HSTU's Triton kernels forward and backward."""
    from hstu.modules.triton_attention import triton_hstu_attention
    from hstu.modules.triton_work import TritonWork

    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise NotRun("Triton's kernels run on GPUs")
    samples = [_make_mask(length) for length in lengths]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return triton_hstu_attention(q, k, v, TritonWork(samples), SCALING_SEQLEN)

    errors: dict[torch.dtype, float] = {}
    for dtype, widths in TRITON_WIDTHS.items():
        for width in widths:
            heads = NUM_HEADS, NUM_HEADS, width
            # The first run compiles the kernels, which may synchronize.
            _run(attention, *(x.to(device) for x in _draw_inputs(sum(lengths), heads, dtype)))
            error = _find_error(attention, _make_reference(lengths), device, dtype, sum(lengths), heads)
            errors[dtype] = max(errors.get(dtype, 0.0), error)
    widths = TRITON_WIDTHS[torch.bfloat16]
    return f"heads of {widths}, output and gradients in {_check_errors(errors)} of float64"


def check_sid_gr(device: torch.device) -> str:
    """Runs SID-GR's causal attention forward and backward, with all key heads and with a single key head."""
    # Runs only this file, because its package imports the batches, and thereby TorchRec.
    module = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "sid_gr/modules/attention.py")))
    lengths = [*LENGTHS, 9, 9, 9, 9]  # short samples of equal length share a call
    with_tokens = [length for length in lengths if length]
    num_queries = [-(-length // 3) for length in with_tokens]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return module.JaggedCausalAttention(lengths)(0, q, k, v)

    def attention_of_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends from the last third of each sample's tokens, and returns zeros for the other tokens."""
        parts = [
            x.split([length - number, number])
            for x, length, number in zip(q.split(with_tokens), with_tokens, num_queries, strict=True)
        ]
        pieces = module.LastQueriesAttention(num_queries, with_tokens, q.device)
        attended = pieces(torch.cat([last for _, last in parts]), k, v).split(num_queries)
        both = zip(parts, attended, strict=True)
        return torch.cat([x for (first, _), last in both for x in (torch.zeros_like(first), last)])

    errors: dict[torch.dtype, float] = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for dtype, each, num_kv_heads in product(errors, (attention, attention_of_pieces), (NUM_HEADS, 1)):
        heads = NUM_HEADS, num_kv_heads, HEAD_DIM
        error = _find_error(each, each, device, dtype, sum(lengths), heads)
        errors[dtype] = max(errors[dtype], error)
    has_varlen = module.has_varlen(torch.empty(1, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device))
    kernel = "varlen_attn" if has_varlen else "scaled_dot_product_attention"
    return f"output and gradients in {_check_errors(errors)} of float64; bfloat16 by {kernel}"


def _make_reference(lengths: Sequence[int]) -> Attention:
    """Returns HSTU's attention in PyTorch, over samples of these lengths."""
    from hstu.modules.attention import jagged_hstu_attention
    from hstu.modules.attention_tiles import AttentionTiles

    samples = [_make_mask(length) for length in lengths]
    return lambda q, k, v: jagged_hstu_attention(q, k, v, AttentionTiles(samples, q.device), SCALING_SEQLEN)


def _make_mask(num_tokens: int) -> SampleMask:
    """Returns a mask with up to 3 contextual tokens, and up to 3 candidates of 2 tokens each."""
    from hstu.modules.attention_mask import SampleMask

    num_contextual = min(num_tokens, 3)
    num_candidates = min((num_tokens - num_contextual) // 2, 3)
    return SampleMask(num_tokens, num_contextual, num_tokens - 2 * num_candidates, 2, True)


def _draw_inputs(num_tokens: int, heads: Heads, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns random q, k, and v, and the gradient of the output, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, width = heads
    return [
        torch.randn(num_tokens, number, width, generator=generator).to(dtype)
        for number in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]


def _find_error(
    attention: Attention,
    reference: Attention,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int = sum(LENGTHS),
    heads: Heads = (NUM_HEADS, NUM_HEADS, HEAD_DIM),
) -> float:
    """Returns the largest relative error of `attention` against `reference` in float64 on the CPU.

    Raises an error if `attention` synchronizes.
    """
    inputs = _draw_inputs(num_tokens, heads, dtype)
    on_device = [tensor.to(device) for tensor in inputs]
    with no_synchronization(device):
        got = _run(attention, *on_device)
    expected = _run(reference, *(tensor.double() for tensor in inputs))
    pairs = zip(got, expected, strict=True)
    return max(float((mine.cpu().double() - theirs).norm() / theirs.norm()) for mine, theirs in pairs)


def _check_errors(errors: Mapping[torch.dtype, float]) -> str:
    """Returns the errors as text.

    Raises:
        AssertionError: an error exceeds its tolerance.
    """
    texts = []
    for dtype, error in errors.items():
        name = str(dtype).removeprefix("torch.")
        if not error <= TOLERANCE[dtype]:
            raise AssertionError(f"{name} is off by {error:.1e}, expected {TOLERANCE[dtype]:.0e} or less")
        texts.append(f"{name} within {error:.0e}")
    return ", ".join(texts)


def _run(attention: Attention, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the output and the gradients of q, k, and v. `tensors` ends with the output's gradient."""
    *qkv, grad_out = tensors
    qkv = [tensor.detach().requires_grad_() for tensor in qkv]
    out = attention(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]
