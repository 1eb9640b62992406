"""Checks two GPUs, alternates training with the stage off, on, and off again, and writes a report file.

`ci/gpu_report` installs the requirements on a machine with GPUs, and runs this command. Without GPUs, the run
is a rehearsal with gloo in place of NCCL, and the file says so.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch

from benchmarks.gpu_check.__main__ import describe_machine, run_parts
from benchmarks.gpu_report.training import train
from benchmarks.harness import Record, run_on_ranks
from benchmarks.markdown import make_table

RANKS = 2


def main() -> None:
    """Writes the report, and prints a summary."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("out/gpu-report.json"))
    file, start = parser.parse_args().file, time.perf_counter()
    results, stand_ins = run_parts()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    training = (
        {"not run": f"needs {RANKS} GPUs; there is one"} if num_gpus == 1 else run_on_ranks(RANKS, train)
    )
    report = {
        "is_rehearsal": not num_gpus,
        "machine": dict(describe_machine()),
        "stand_ins": stand_ins,
        "check": [dataclasses.asdict(result) for result in results],
        "training": training,
        "minutes": round((time.perf_counter() - start) / 60, 1),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    outcomes = [result.outcome for result in results]
    print(", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "not run")))
    if "not run" not in training:
        print(_table(training))
    print(f"{'A rehearsal without GPUs. ' * report['is_rehearsal']}Report in {file}: paste it into an issue.")


def _table(training: Record) -> str:
    rows = [
        {"stage": name, "rate": rate, "imbalance": training["imbalance"][name]}
        for name, rate in training["samples_per_second"].items()
    ]
    return make_table(
        rows,
        {
            "stage": "{stage}",
            "samples/s": "{rate[median]:.0f} ({rate[min]:.0f}–{rate[max]:.0f})",
            "imbalance": "{imbalance[median]:.3f}",
        },
    )


if __name__ == "__main__":
    main()
