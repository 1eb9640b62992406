"""Runs the stream cases in a separate process under torch's CUDA sanitizer, which reports races."""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.gpu_check import rows
from benchmarks.gpu_check.parts import PARTS, run
from benchmarks.gpu_check.ranks import run_python
from benchmarks.gpu_check.stand_in import install_where_missing

_MODULE = "benchmarks.gpu_check.sanitized"
_CASES = ("streams: exchange, then compute", "streams: training steps")


def check_sanitized(device: torch.device) -> str:
    """Runs the stream cases. The sanitizer sees kernels of torch's operations, but not of libraries."""
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {}
    return run_python("-m", _MODULE, device.type, **sanitizer).strip().splitlines()[-1]


def main() -> int:
    """Prints the outcome of each case, and returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m {_MODULE}", description=__doc__)
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
