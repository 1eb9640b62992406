"""Tests and the demo over NCCL, in processes of their own with a GPU each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu_check.parts import REPOSITORY

LINES_SHOWN = 80  # of the output of a command that fails
TIMEOUT_S = 3600


def gradient_tests(device: torch.device) -> str:
    """Runs the tests that no shuffler setting, cut samples included, changes what a step learns."""
    return _pytest(device, "tests/test_gradients.py", "tests/test_gradients_of_pieces.py")


def exchange_tests(device: torch.device) -> str:
    """Runs the tests that both exchanges deliver the planned samples bit for bit."""
    return _pytest(device, "tests/commons/distributed/test_exchange.py")


def demo(device: torch.device) -> str:
    """Trains as `make demo` does, as loaded and balanced, on two GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        _output("-m", "benchmarks.demo", folder)
        arms = json.loads((Path(folder) / "summary.json").read_text())["balanced"]
    found = []
    for name, arm in arms.items():
        difference = arm["max_relative_loss_difference"]
        found.append(f"{name}: {arm['untrimmed']['speedup']:.2f}×, losses differ by {difference:.0e}")
    return "; ".join(found)


def _pytest(device: torch.device, *paths: str) -> str:
    """Runs tests with pools of processes on a type of device; those with too many ranks are skipped."""
    # Without the options of pyproject.toml, which need plugins.
    options = ("-o", "addopts=", "-q", "-p", "no:cacheprovider")
    return _output("-m", "pytest", *options, *paths, TEST_DEVICE=device.type).strip().splitlines()[-1]


def _output(*command: str, **environment: str) -> str:
    """Returns what a Python command prints.

    Raises:
        RuntimeError: it fails, or takes too long; its last lines are in a note.
    """
    # Without what describes this process to torch.distributed.
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env={**inherited, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        outcome, output = f"ended with exit code {done.returncode}", done.stdout
        if not done.returncode:
            return output
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        outcome = f"did not end within {TIMEOUT_S} s"
    failure = RuntimeError(f"`python {' '.join(command)}` {outcome}")
    failure.add_note("\n".join(output.splitlines()[-LINES_SHOWN:]))
    raise failure
