"""Runs entry points as users do: under torchrun, from a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),  # hstu runs from a checkout, and what runs writes to its working directory
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # two ranks cannot share one GPU
}
RANKING = ("-m", "hstu.training.pretrain_gr_ranking")
RETRIEVAL = ("-m", "hstu.training.pretrain_gr_retrieval")
SID_GR = ("-m", "sid_gr.training.pretrain_sid_gr")


def torchrun(
    directory: Path,
    *arguments: str | Path,
    fails: bool = False,
    ranks: int = 2,
    timeout: float = 120.0,
    restarts: int = 0,
) -> str:
    """Output of `torchrun --nproc_per_node RANKS ARGUMENTS`, run in `directory`, stdout and stderr together.

    Raises:
        AssertionError: it fails and should not, or the other way round, or does not end in time; the message
            has its output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [f"--max-restarts={restarts}"] if restarts else []
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {timeout} s\n{output}") from None
    if (process.returncode != 0) != fails:
        raise AssertionError(f"exit code {process.returncode}\n{output}")
    return output


def bind(*bindings: str) -> list[str]:
    """Command line arguments that override settings of a gin file."""
    return ["--gin-bindings", *bindings]
