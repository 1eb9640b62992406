"""Parts in processes of their own: tests over NCCL, and streams under torch's CUDA sanitizer.

The sanitizer reports races of kernels of torch's operations, but not of libraries. `python -m
benchmarks.gpu_check.processes DEVICE` is its process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch

from benchmarks.gpu_check import rows
from benchmarks.gpu_check.parts import PARTS, REPOSITORY, run
from benchmarks.gpu_check.stand_in import install_where_missing

_MODULE = "benchmarks.gpu_check.processes"
_CASES = ("streams: exchange, then compute", "streams: training steps")
LINES_SHOWN = 80  # last lines of a failed command's output
TIMEOUT_S = 3600


def run_gradient_tests(device: torch.device) -> str:
    """Tests that no shuffler setting, pieces included, changes what a step learns."""
    return _run_pytest(device, "tests/test_gradients.py")


def run_exchange_tests(device: torch.device) -> str:
    """Tests that both exchanges deliver the planned samples bit for bit."""
    return _run_pytest(device, "tests/commons/distributed/test_shuffle.py", "-k", "bit_for_bit")


def check_sanitized(device: torch.device) -> str:
    """Runs the stream cases under the sanitizer."""
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {}
    return run_python("-m", _MODULE, device.type, **sanitizer).strip().splitlines()[-1]


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


def main() -> int:
    """Prints the outcome of each stream case, and returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m {_MODULE}", description="Runs the stream cases.")
    parser.add_argument("device", choices=("cuda", "cpu"))
    device_type = parser.parse_args().device
    install_where_missing()
    rows.DELAY_CYCLES = 0  # the sanitizer checks order, not timing
    results = [run(part, torch.device(device_type), 1) for part in PARTS if part.name in _CASES]
    failed = [result for result in results if result.outcome == "failed"]
    for result in failed:
        print(result.trace)
    print("; ".join(f"{result.part}: {result.outcome}" for result in results))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
