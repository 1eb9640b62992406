"""Runs the parts of the GPU check that need one GPU on the CPU; prints their results as JSON.

python -m tests.benchmarks.gpu_check_on_cpu [PACKAGE_TO_HIDE ...]
"""

import commons.quiet_logs  # noqa: F401  isort: skip
import dataclasses
import json
import sys

import torch

from benchmarks.gpu_check.parts import PARTS, run
from benchmarks.gpu_check.stand_in import install_where_missing


def main() -> None:
    for package in sys.argv[1:]:
        sys.modules[package] = None  # type: ignore[assignment]  # as if it were not installed
    stand_ins = install_where_missing()
    # The sanitizer's process has all packages, and runs the other cases of streams.
    in_that_process = "streams under" if stand_ins else "streams"
    parts = [part for part in PARTS if not part.name.startswith(in_that_process)]
    results = [run(part, torch.device("cpu"), num_gpus=1) for part in parts]
    print(json.dumps([stand_ins, [dataclasses.asdict(result) for result in results]]))


if __name__ == "__main__":
    main()
