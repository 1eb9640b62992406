"""Runs entry points as users do: under torchrun, from a folder of their own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.process_pool import free_port
from tests.rank_server import forked_python

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),  # hstu runs from a checkout, and each run writes to its working directory
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # two ranks cannot share one GPU
}
RANKING = ("-m", "hstu.training.pretrain_gr_ranking")
RETRIEVAL = ("-m", "hstu.training.pretrain_gr_retrieval")
SID_GR = ("-m", "sid_gr.training.pretrain_sid_gr")
_TIMEOUT = 120.0


def torchrun(
    directory: Path,
    *arguments: str | Path,
    fails: bool = False,
    ranks: int = 2,
    restarts: int = 0,
    fresh: bool = False,
) -> str:
    """Returns the output of `torchrun --nproc_per_node RANKS ARGUMENTS`, checking whether it fails.

    Ranks are forked from a process that has imported TorchRec, as torchrun is. With `fresh`, that process has
    imported nothing of this repository, and ranks end as interpreters do.
    """
    options = [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    options += [f"--master-port={free_port()}"]  # cheaper than the rendezvous of --standalone
    options += ["--no-python", *forked_python(fresh)]
    return python(directory, "-m", "torch.distributed.run", *options, *arguments, fails=fails)


def python(directory: Path, *arguments: str | Path, fails: bool = False, fresh: bool = False) -> str:
    """Returns the output of `python ARGUMENTS`, run by a forked interpreter; otherwise like `torchrun`."""
    return _run(directory, [*forked_python(fresh), *map(str, arguments)], fails)


def _run(directory: Path, command: list[str], fails: bool) -> str:
    process = subprocess.Popen(
        command, cwd=directory, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {_TIMEOUT} s\n{output}") from None
    if (process.returncode != 0) != fails:
        raise AssertionError(f"exit code {process.returncode}\n{output}")
    return output


def bind(*bindings: str) -> list[str]:
    """Returns command line arguments that override settings of a gin file."""
    return ["--gin-bindings", *bindings]


def train_log(directory: Path) -> list[dict[str, Any]]:
    """Returns the lines of `train.jsonl` in a run's log directory."""
    return [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
