"""Runs the Triton attention kernels in Triton's interpreter, on a CPU.

`TRITON_INTERPRET=1 python -m tests.hstu.modules.interpreted_attention FILE` saves the results of all
cases. It runs in a process of its own, because triton reads the switch at import.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hstu.modules import SampleMask
from tests.hstu.modules.attention_cases import CASES, SCALING_SEQLEN, Case, mask
from tests.hstu.modules.internals import TritonWork, triton_hstu_attention
from tests.hstu.modules.pieces import Piece, attention_in_pieces, cut


def _in_pieces(is_causal: bool, tokens: int) -> tuple[list[SampleMask], list[list[Piece]]]:
    """Returns three samples and the pieces of three ranks. One sample is whole, the last rank is empty."""
    masks = [mask(*numbers, tokens, is_causal) for numbers in ((3, 40, 3), (0, 9, 0), (0, 18, 2))]
    first, last = cut(0, masks[0], [4, 5, 24]), cut(2, masks[2], [16])
    return masks, [[first[2], last[1], first[0]], [*cut(1, masks[1], []), first[3], last[0], first[1]], []]


IN_PIECES = {
    "pieces": _in_pieces(is_causal=True, tokens=2),
    "pieces, not causal": _in_pieces(is_causal=False, tokens=1),
}


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


def run_in_pieces(masks: Sequence[SampleMask], ranks: Sequence[Sequence[Piece]]) -> list[torch.Tensor]:
    """Returns the output and the gradients of q, k and v of samples cut into pieces."""
    *qkv, grad_out = Case(tuple(masks)).inputs()
    out = attention_in_pieces("triton", masks, ranks, qkv, int(SCALING_SEQLEN))
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


if __name__ == "__main__":
    results = {name: run_kernels(case.masks, case.inputs()) for name, case in CASES.items()}
    results |= {name: run_in_pieces(*samples) for name, samples in IN_PIECES.items()}
    torch.save(results, sys.argv[1])
