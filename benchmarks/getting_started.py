"""Runs `docs/getting-started.md`'s first training with the stage off and on, and the README's comparison."""

from __future__ import annotations

import re
import statistics
import subprocess
from tempfile import TemporaryDirectory

from benchmarks.harness import Record, run_torchrun, show_progress

ROUNDS = 3
_SHOWN = 3  # lines of the comparison in the README
# The command is as on the pages, except for the folder of the log.
COMMAND = "-m hstu.training.pretrain_gr_ranking --gin-config-file benchmarks/demo/hstu.gin"
BINDINGS = "TrainerArgs.max_train_iters=30 TrainerArgs.log_interval=15 TrainerArgs.max_eval_iters=1"
ON = "TrainerArgs.enable_balanced_shuffler=True"


def measure() -> Record:
    """Returns the last line of each run, its samples per second, and the lines of the comparison."""
    runs: dict[str, list[str]] = {"off": [], "on": []}
    for _ in show_progress(range(ROUNDS), "off and on, in turns"):
        for name, bindings in (("off", []), ("on", [ON])):
            runs[name].append(_train(*bindings))
    speeds = {name: [_read_samples_per_second(line) for line in lines] for name, lines in runs.items()}
    return {"lines": runs, "samples_per_second": speeds, "equality": _run("--check-equal", "5")}


def _train(*bindings: str) -> str:
    """Returns a run's line for its last step."""
    with TemporaryDirectory() as folder:
        lines = _run("--gin-bindings", *BINDINGS.split(), f"TrainerArgs.log_dir='{folder}'", *bindings)
    return [line for line in lines if " loss " in line and line.startswith("step ")][-1]


def _run(*arguments: str) -> list[str]:
    """Returns the lines that the entry point prints on two ranks."""
    _, module, *options = COMMAND.split()
    return run_torchrun(2, module, *options, *arguments, stdout=subprocess.PIPE).stdout.splitlines()


def _read_samples_per_second(line: str) -> float:
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
