"""The models' attention on one GPU, compared with the CPU in float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_check.parts import REPOSITORY, no_synchronization

# Relative L2 error against float64, of the output and of each gradient.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS = (1, 200, 0, 37, 513)
NUM_HEADS, HEAD_DIM = 2, 32

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def masks(device: torch.device) -> str:
    """Computes blocks of attention masks."""
    from hstu.modules.attention_mask import SampleMask
    from hstu.modules.attention_tiles import Chunk

    def blocks(mask: SampleMask, on: torch.device) -> list[torch.Tensor | None]:
        chunk = Chunk((mask,), (0,), num_tokens=96, heads=slice(0, 1), row_tiles=1, device=on)
        return [visible for *_, visible in chunk.row_blocks()]

    compared = 0
    for num_contextual in (0, 3, 40):
        for history_end in (60, 70):
            for is_causal in (True, False):
                mask = SampleMask(70, num_contextual, history_end, 2, is_causal)
                with no_synchronization(device):
                    got = blocks(mask, device)
                for mine, expected in zip(got, blocks(mask, torch.device("cpu")), strict=True):
                    if mine is None or expected is None:
                        same = mine is expected
                    else:
                        same = torch.equal(mine.cpu(), expected)
                    if not same:
                        raise AssertionError(f"rows of {mask} see other tokens than on the CPU")
                    compared += 1
    return f"{compared} blocks"


def hstu_attention(device: torch.device) -> str:
    """Runs HSTU's jagged attention forward and backward."""
    from hstu.modules.attention import jagged_hstu_attention
    from hstu.modules.attention_mask import SampleMask
    from hstu.modules.attention_tiles import AttentionTiles

    def mask(num_tokens: int) -> SampleMask:
        """Up to 3 contextual tokens, and up to 3 candidates of 2 tokens."""
        num_contextual = min(num_tokens, 3)
        return SampleMask(num_tokens, num_contextual, max(num_tokens - 6, num_contextual), 2, True)

    samples = [mask(length) for length in LENGTHS]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return jagged_hstu_attention(q, k, v, AttentionTiles(samples, q.device), 512.0)

    return _compared(attention, device)


def sid_gr_attention(device: torch.device) -> str:
    """Runs SID-GR's causal attention forward and backward."""
    # The file alone, because its package imports batches, and these TorchRec.
    spec = importlib.util.spec_from_file_location(
        "sid_gr_attention", REPOSITORY / "sid_gr/modules/attention.py"
    )
    if spec is None or spec.loader is None:
        raise ImportError("sid_gr/modules/attention.py cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _compared(lambda q, k, v: module.JaggedCausalAttention(LENGTHS)(0, q, k, v), device)


def _compared(attention: Attention, device: torch.device) -> str:
    """Returns the errors of attention in each dtype, without synchronization; raises if one is too large."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(sum(LENGTHS), NUM_HEADS, HEAD_DIM, generator=generator) for _ in range(4)]
    errors = []
    for dtype, tolerance in TOLERANCE.items():
        rounded = [tensor.to(dtype) for tensor in drawn]
        on_device = [tensor.to(device) for tensor in rounded]
        with no_synchronization(device):
            got = _forward_backward(attention, *on_device)
        expected = _forward_backward(attention, *(tensor.double() for tensor in rounded))
        error = max(
            _relative(mine.cpu().double(), theirs) for mine, theirs in zip(got, expected, strict=True)
        )
        name = str(dtype).removeprefix("torch.")
        if not error <= tolerance:
            raise AssertionError(f"{name} is off by {error:.1e}, expected {tolerance:.0e} or less")
        errors.append(f"{name} within {error:.0e}")
    return f"output and gradients in {', '.join(errors)} of float64"


def _forward_backward(attention: Attention, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the output, and the gradients of q, k and v; the last of `tensors` is that of the output."""
    *qkv, grad_out = tensors
    qkv = [tensor.detach().requires_grad_() for tensor in qkv]
    out = attention(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())
