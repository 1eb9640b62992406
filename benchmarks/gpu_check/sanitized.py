"""The stream cases in a process of their own, under torch's CUDA sanitizer, which reports races."""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu_check import rows
from benchmarks.gpu_check.parts import PARTS, run
from benchmarks.gpu_check.ranks import run_python
from benchmarks.gpu_check.stand_in import install_where_missing

_CASES = ("streams: exchange, then compute", "streams: training steps")


def check_sanitized(device: torch.device) -> str:
    """Runs the stream cases; the sanitizer sees the kernels of torch's operations, not those of libraries."""
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else {}
    return run_python("-m", __name__, device.type, **sanitizer).strip().splitlines()[-1]


def main(device_type: str) -> int:
    """Prints what ran; returns the exit code."""
    install_where_missing()
    rows.DELAY_CYCLES = 0  # order is what counts here, not time
    results = [run(part, torch.device(device_type), 1) for part in PARTS if part.name in _CASES]
    failed = [result for result in results if result.outcome == "failed"]
    for result in failed:
        print(result.trace)
    print("; ".join(f"{result.part}: {result.outcome}" for result in results))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
