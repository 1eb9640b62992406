"""Runs `docs/getting-started.md`'s first training with the stage off and on, and the README's comparison."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Record, show_progress

REPOSITORY = Path(__file__).parents[1]
ROUNDS = 3
_SHOWN = 3  # lines of the comparison in the README
# The command is as on the pages, except for the folder of the log.
COMMAND = "-m hstu.training.pretrain_gr_ranking --gin-config-file benchmarks/demo/hstu.gin"
BINDINGS = "TrainerArgs.max_train_iters=30 TrainerArgs.log_interval=15 TrainerArgs.max_eval_iters=1"
ON = "TrainerArgs.enable_balanced_shuffler=True"


def measure() -> Record:
    """Returns the last line of each run, its samples per second, and the lines of the comparison."""
    runs: dict[str, list[str]] = {"off": [], "on": []}
    for number in show_progress(range(2 * ROUNDS), "off and on, in turns"):
        name = ("off", "on")[number % 2]
        runs[name].append(_last_line(*([ON] if name == "on" else [])))
    speeds = {name: [_samples_per_second(line) for line in lines] for name, lines in runs.items()}
    equality = _lines("--check-equal", "5")
    return {"lines": runs, "samples_per_second": speeds, "equality": equality}


def _last_line(*bindings: str) -> str:
    """Returns a run's line for its last step."""
    with TemporaryDirectory() as folder:
        lines = _lines("--gin-bindings", *BINDINGS.split(), f"TrainerArgs.log_dir='{folder}'", *bindings)
    return [line for line in lines if " loss " in line and line.startswith("step ")][-1]


def _lines(*arguments: str) -> list[str]:
    """Returns the lines that the entry point prints on two ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ran = subprocess.run(
        [*launch, *COMMAND.split(), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


def _samples_per_second(line: str) -> float:
    found = re.search(r"(\d+) samples/s", line)
    return float(found[1]) if found else 0.0


def tables(figures: Record) -> dict[str, str]:
    """Returns the comparison, the lines of the median runs, and the speedup, by marker."""
    lines = []
    for name in ("off", "on"):
        of_runs = figures["samples_per_second"][name]
        lines.append(figures["lines"][name][of_runs.index(statistics.median_low(of_runs))])
    speeds = figures["samples_per_second"]
    ratios = [on / off for off, on in zip(speeds["off"], speeds["on"], strict=True)]
    return {
        "readme equality": "\n".join(["```text", *figures["equality"][:_SHOWN], "```"]),
        "getting-started lines": "\n".join(["```text", *lines, "```"]),
        "getting-started speedup": f"{statistics.median(ratios):.2f} times as many samples per second "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs of runs)",
    }
