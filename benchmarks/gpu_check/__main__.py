"""Repeats the tests' checks on this machine's GPUs, and prints a report to paste into an issue.

Each part passes, fails, or does not run for a reason that the report gives. The check installs nothing. If
TorchRec or tensordict is missing, packing and attention use stand-ins for their classes, and the report says
so. The exit code is 1 if a part failed, else 0.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import sys
from collections.abc import Sequence

import torch

from benchmarks.gpu_check.parts import PARTS, Part, Result, is_broken, run
from benchmarks.gpu_check.report import make_report
from benchmarks.gpu_check.stand_in import install_where_missing


def run_parts(parts: Sequence[Part] = PARTS) -> tuple[list[Result], list[str]]:
    """Runs parts on this machine's GPUs, and returns the results and the stand-ins. Progress is on stderr."""
    stand_ins = install_where_missing()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0)
    results: list[Result] = []
    broken_by = ""
    for part in parts:
        if broken_by and part.num_gpus == 1:
            results.append(Result(part.name, "not run", f"{broken_by!r} left the GPU unusable"))
            continue
        if num_gpus:
            print(f"{part.name} …", file=sys.stderr, flush=True)
        results.append(run(part, device, num_gpus))
        if results[-1].outcome == "failed" and is_broken(device):
            broken_by = part.name
    return results, stand_ins


def main() -> int:
    """Prints the report on stdout, and returns the exit code."""
    argparse.ArgumentParser("python -m benchmarks.gpu_check", description=__doc__).parse_args()
    results, stand_ins = run_parts()
    print(make_report(results, stand_ins))
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
