"""Runs the Triton attention kernels in Triton's interpreter, on a CPU.

`TRITON_INTERPRET=1 python -m tests.hstu.modules.interpreted_attention FILE` saves the results of all
cases. It runs in a process of its own, because triton reads the switch at import.
"""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hstu.modules import SampleMask
from hstu.modules.triton_attention import triton_hstu_attention
from hstu.modules.triton_work import TritonWork
from tests.hstu.modules.pieces import Piece, attention_in_pieces, cut

SCALING_SEQLEN = 50.0
MAX_TOKENS = 100


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


def _in_pieces(is_causal: bool, tokens: int) -> tuple[list[SampleMask], list[list[Piece]]]:
    """Returns three samples and the pieces of three ranks. One sample is whole, the last rank is empty."""
    masks = [mask(*numbers, tokens, is_causal) for numbers in ((3, 40, 3), (0, 9, 0), (0, 18, 2))]
    first, last = cut(0, masks[0], [4, 5, 24]), cut(2, masks[2], [16])
    return masks, [[first[2], last[1], first[0]], [*cut(1, masks[1], []), first[3], last[0], first[1]], []]


# By backend; "cutlass" leaves pieces to Triton.
IN_PIECES = {"triton": _in_pieces(is_causal=True, tokens=2), "cutlass": _in_pieces(is_causal=False, tokens=1)}


def interpret(file: Path) -> dict[str, list[torch.Tensor]]:
    """Returns the output and the gradients of q, k and v of each case, from a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, str(file)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the interpreter failed:\n{ran.stderr}")
    return torch.load(file)


def run_kernels(masks: Sequence[SampleMask], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the output and the gradients of q, k and v, given these and the gradient of the output."""
    *qkv, grad_out = inputs
    out = triton_hstu_attention(*qkv, TritonWork(masks), SCALING_SEQLEN)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


def run_in_pieces(
    backend: str, masks: Sequence[SampleMask], ranks: Sequence[Sequence[Piece]]
) -> list[torch.Tensor]:
    """Returns the output and the gradients of q, k and v of samples cut into pieces."""
    *qkv, grad_out = Case(tuple(masks)).inputs()
    out = attention_in_pieces(backend, masks, ranks, qkv, int(SCALING_SEQLEN))
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


if __name__ == "__main__":
    results = {name: run_kernels(case.masks, case.inputs()) for name, case in CASES.items()}
    results |= {backend: run_in_pieces(backend, *samples) for backend, samples in IN_PIECES.items()}
    torch.save(results, sys.argv[1])
