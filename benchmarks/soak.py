"""Kills a training run again and again, and checks that its losses match an undisturbed run.

Kills two ranks at random moments: at their start, in steps, in evaluations, and while they write checkpoints.
Then restarts them as torchrun would, except that they are forks of a process that has imported TorchRec.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.harness import Record, machine, show_progress, start_forks, write_result
from commons.distributed.placement import warm_up
from commons.distributed.settings import ShufflerSettings
from commons.training import run_rank
from hstu.training.pretrain_gr_ranking import main as train

KILLS, STEPS_PER_KILL, RANKS = 100, 12, 2
EVAL_INTERVAL = 7
LONGEST_WAIT_S = 120.0
# Longest time from the beginning of an activity to the kill, and from the first rank's kill to the second's.
LONGEST_DELAY_S = {"start": 1.0, "step": 0.05, "evaluation": 0.1, "checkpoint": 0.03}
LONGEST_BETWEEN_RANKS_S = 0.3


def main() -> None:
    """Compares a disturbed run with an undisturbed run, prints the figures, and writes them to `results`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=KILLS)
    kills: int = parser.parse_args().kills
    num_steps = STEPS_PER_KILL * (kills + 2)
    # Does the setup of all starts once, and avoids threads, which would not survive a fork.
    torch.set_num_threads(1)
    warm_up(ShufflerSettings())
    tqdm.monitor_interval = 0
    with TemporaryDirectory() as folder:
        undisturbed, disturbed = _Run(Path(folder) / "undisturbed"), _Run(Path(folder) / "disturbed")
        undisturbed.finish(num_steps)
        interrupted = _disturb(disturbed, num_steps, kills)
        figures = {"kills": kills, "interrupted": interrupted, **_compare(undisturbed, disturbed, num_steps)}
    figures |= {"ranks": RANKS, "machine": machine()}
    print(json.dumps(figures, indent=1))
    write_result("soak", figures)


class _Run:
    """A training run in a folder, which may start several times."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.known = 0  # number of log lines at the last start

    def start(self, num_steps: int) -> None:
        """Starts the ranks, which resume from the last checkpoint."""
        self.known = len(self.lines())
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self._ranks = start_forks(RANKS, _run_rank, self.folder, num_steps, port)

    def finish(self, num_steps: int) -> None:
        """Starts the ranks, and waits until all of them end. Raises a RuntimeError if a rank fails."""
        self.start(num_steps)
        for rank in self._ranks:
            rank.join()
        self.check(exit_code=0)

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition, which must become true before the run ends."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                self._fail("hangs")
            time.sleep(0.001)

    def check(self, exit_code: int | None = None) -> None:
        """Raises a RuntimeError if a rank's exit code is not `exit_code`. None means that ranks still run."""
        if any(rank.exitcode != exit_code for rank in self._ranks):
            self._fail("has ended")

    def _fail(self, how: str) -> NoReturn:
        raise RuntimeError(f"the run {how}:\n{(self.folder / 'output.txt').read_text()}")

    def kill(self, rng: np.random.Generator) -> None:
        """Kills the ranks in random order, with a short random delay between them."""
        for place, rank in enumerate(rng.permutation(RANKS)):
            time.sleep(rng.uniform(0, LONGEST_BETWEEN_RANKS_S) if place else 0)
            self._ranks[rank].kill()
        for rank in self._ranks:
            rank.join()

    def lines(self) -> list[Record]:
        """Returns the complete lines of the log. Steps that were computed again occur more than once."""
        log = self.folder / "logs" / "train.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def find_activity(self) -> str:
        """Returns the run's current activity, a key of `LONGEST_DELAY_S`."""
        lines = self.lines()
        if not any(line["kind"] == "train" for line in lines[self.known :]):
            return "start"
        if any(self.folder.glob("checkpoints/*.unfinished")):
            return "checkpoint"
        *_, last = (line for line in lines if line["kind"] != "checkpoint")
        return "evaluation" if last["kind"] == "train" and last["step"] % EVAL_INTERVAL == 0 else "step"

    def results(self) -> list[tuple[str, int, float]]:
        """Returns (kind, step, loss or AUC) of all steps and evaluations, in order."""
        names = {"train": "loss", "eval": "AUC"}
        lines = (line for line in self.lines() if line["kind"] in names)
        return [(line["kind"], line["step"], line[names[line["kind"]]]) for line in lines]


def _run_rank(rank: int, folder: Path, num_steps: int, port: int) -> None:
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    ranks: Record = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    settings = {"max_train_iters": num_steps, "eval_interval": EVAL_INTERVAL, "max_eval_iters": 3}
    bindings = [f"TrainerArgs.{name} = {value}" for name, value in settings.items()]
    config = str(Path(__file__).with_name("soak.gin"))
    sys.argv = ["soak", "--gin-config-file", config, "--gin-bindings", *bindings]
    run_rank(train)


def _disturb(run: _Run, num_steps: int, kills: int) -> dict[str, int]:
    """Kills a run at random moments, then lets it end. Returns the number of kills in each activity."""
    rng = np.random.default_rng(0)
    interrupted: Counter[str] = Counter()
    for _ in show_progress(range(kills), "kill"):
        run.start(num_steps)
        wanted = rng.choice(list(LONGEST_DELAY_S), p=[0.1, 0.3, 0.3, 0.3])
        if wanted != "start":
            lines = run.known + int(rng.integers(2, 8))
            run.until(lambda: len(run.lines()) >= lines)  # noqa: B023  called before the next round
        if wanted in ("evaluation", "checkpoint"):
            run.until(lambda: run.find_activity() == wanted)  # noqa: B023
        time.sleep(rng.uniform(0, LONGEST_DELAY_S[wanted]))
        run.check()
        interrupted[run.find_activity()] += 1
        run.kill(rng)
    run.finish(num_steps)
    if left := list((run.folder / "checkpoints").glob("*.unfinished")):
        raise RuntimeError(f"left behind: {left}")
    return dict(sorted(interrupted.items()))


def _compare(undisturbed: _Run, disturbed: _Run, num_steps: int) -> Record:
    """Compares both runs, and returns the numbers of steps.

    Raises:
        RuntimeError: the results of a step differ, or a step is missing.
    """
    results = disturbed.results()
    different = sorted(set(results) ^ set(undisturbed.results()))
    steps = [step for kind, step, _ in results if kind == "train"]
    left_out = [step for before, step in pairwise([0, *steps]) if step > before + 1]
    if different or left_out or steps[-1] != num_steps:
        raise RuntimeError(f"different results {different}, steps left out before {left_out}")
    return {"steps": num_steps, "steps_computed_again": len(steps) - num_steps}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    text = (
        "{kills} kills, {interrupted[checkpoint]} while a checkpoint was written, "
        "{interrupted[evaluation]} in evaluations, {interrupted[step]} in steps and {interrupted[start]} at "
        "the start: all {steps:,} steps, {steps_computed_again} of them computed again"
    )
    return {"soak result": text.format(**figures)}


if __name__ == "__main__":
    main()
