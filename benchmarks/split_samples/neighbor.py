"""Keeps a core busy with attention, at the lowest priority, while a rank waits for the others.

Ranks on one machine share caches and memory, so one computes faster while the other waits. Devices of their
own would not. With a neighbor per rank, a rank computes as if the others never waited.

python -m benchmarks.split_samples.neighbor
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.command_line import parse_arguments
from hstu.modules import SampleMask, batch_attention

TOKENS, NUM_HEADS, HEAD_DIM = 4096, 2, 64


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """While active, whatever this rank's core has left is taken."""
    process = subprocess.Popen([sys.executable, "-m", __name__])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Computes until it is killed."""
    parse_arguments(__doc__)
    os.nice(19)
    torch.set_num_threads(1)
    attention = batch_attention("pytorch", [SampleMask(TOKENS, 0, TOKENS, 1, True)], 1, torch.device("cpu"))
    q, k, v = torch.randn(3, TOKENS, NUM_HEADS, HEAD_DIM, requires_grad=True).unbind()
    while True:
        attention(q, k, v).sum().backward()


if __name__ == "__main__":
    main()
