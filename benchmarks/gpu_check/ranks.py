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


def run_gradient_tests(device: torch.device) -> str:
    """Runs the tests that no shuffler setting, cut samples included, changes what a step learns."""
    return _run_pytest(device, "tests/test_gradients.py", "tests/test_gradients_of_pieces.py")


def run_exchange_tests(device: torch.device) -> str:
    """Runs the tests that both exchanges deliver the planned samples bit for bit."""
    return _run_pytest(device, "tests/commons/distributed/test_exchange.py")


def run_demo(device: torch.device) -> str:
    """Trains as `make demo` does, as loaded and balanced, on two GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        run_python("-m", "benchmarks.demo", folder)
        arms = json.loads((Path(folder) / "summary.json").read_text())["balanced"]
    text = "{name}: {untrimmed[speedup]:.2f}×, losses differ by {max_relative_loss_difference:.0e}"
    return "; ".join(text.format(name=name, **arm) for name, arm in arms.items())


def _run_pytest(device: torch.device, *paths: str) -> str:
    """Runs tests with pools of processes on a type of device; those with too many ranks are skipped."""
    # Without the options of pyproject.toml, which need plugins.
    options = ("-o", "addopts=", "-q", "-p", "no:cacheprovider")
    return run_python("-m", "pytest", *options, *paths, TEST_DEVICE=device.type).strip().splitlines()[-1]


def run_python(*command: str, **environment: str) -> str:
    """Returns what a Python command prints.

    Raises:
        RuntimeError: it fails; its last lines are in a note.
        subprocess.TimeoutExpired: it takes too long.
    """
    # Without what describes this process to torch.distributed.
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        failure = RuntimeError(f"`python {' '.join(command)}` ended with exit code {done.returncode}")
        failure.add_note("\n".join(done.stdout.splitlines()[-LINES_SHOWN:]))
        raise failure
    return done.stdout
