"""Starts a module on several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(num_ranks: int, module: str, *arguments: str | Path) -> None:
    """Runs `torchrun --nproc_per_node NUM_RANKS -m MODULE ARGUMENTS`, one thread per rank.

    Raises:
        subprocess.CalledProcessError: the run fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    subprocess.run(
        [*command, "-m", module, *map(str, arguments)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
