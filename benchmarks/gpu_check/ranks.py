"""Tests and the demo over NCCL, in separate processes with one GPU each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu_check.parts import REPOSITORY

LINES_SHOWN = 80  # last lines of a failed command's output
TIMEOUT_S = 3600


def run_gradient_tests(device: torch.device) -> str:
    """Tests that no shuffler setting, pieces included, changes what a step learns."""
    return _run_pytest(device, "tests/test_gradients.py")


def run_exchange_tests(device: torch.device) -> str:
    """Tests that both exchanges deliver the planned samples bit for bit."""
    return _run_pytest(device, "tests/commons/distributed/test_shuffle.py", "-k", "bit_for_bit")


def run_demo(device: torch.device) -> str:
    """Runs `make demo`, which trains as loaded and balanced, on two GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        run_python("-m", "benchmarks.demo", folder)
        arms = json.loads((Path(folder) / "summary.json").read_text())["balanced"]
    text = "{name}: {untrimmed[speedup]:.2f}×, losses differ by {max_relative_loss_difference:.0e}"
    return "; ".join(text.format(name=name, **arm) for name, arm in arms.items())


def _run_pytest(device: torch.device, *paths: str) -> str:
    """Runs tests in pools of processes on a type of device. Skips tests that need more ranks than devices."""
    # Drops the options of pyproject.toml, which need plugins.
    options = ("-o", "addopts=", "-q", "-p", "no:cacheprovider")
    return run_python("-m", "pytest", *options, *paths, TEST_DEVICE=device.type).strip().splitlines()[-1]


def run_python(*command: str, **environment: str) -> str:
    """Returns the output of a Python command, including stderr.

    Raises:
        RuntimeError: the command fails. A note has the last lines of its output.
        subprocess.TimeoutExpired: the command takes longer than `TIMEOUT_S`.
    """
    # Drops the variables that describe this process to torch.distributed.
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
