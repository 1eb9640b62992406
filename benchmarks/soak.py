"""Kills a training run again and again, and checks that its losses match an undisturbed run.

Kills two ranks at drawn moments: at their start, in steps, in evaluations, and while they write checkpoints.
Then starts them again, as torchrun would, but as forks of a process that has imported TorchRec.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.harness import Record, machine, progress, write_result
from commons.distributed.placement import warm_up
from commons.distributed.shuffler_settings import ShufflerSettings
from commons.training import run_rank
from hstu.training.pretrain_gr_ranking import main as train

KILLS, STEPS_PER_KILL, RANKS = 100, 12, 2
EVAL_INTERVAL = 7
LONGEST_WAIT_S = 120.0
# How long after its beginning a kill may hit what it interrupts, and how much later the other rank's is.
LONGEST_DELAY_S = {"start": 1.0, "step": 0.05, "evaluation": 0.1, "checkpoint": 0.03}
LONGEST_BETWEEN_RANKS_S = 0.3

_fork = multiprocessing.get_context("fork")


def main() -> None:
    """Runs undisturbed and disturbed, compares both, prints the figures and writes them to `results`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=KILLS)
    kills: int = parser.parse_args().kills
    num_steps = STEPS_PER_KILL * (kills + 2)
    _prepare_to_fork()
    with TemporaryDirectory() as folder:
        undisturbed, disturbed = Path(folder) / "undisturbed", Path(folder) / "disturbed"
        _Job(undisturbed, num_steps).wait()
        interrupted = _disturb(disturbed, num_steps, kills)
        figures = {"kills": kills, "interrupted": interrupted, **_compare(undisturbed, disturbed, num_steps)}
    figures |= {"ranks": RANKS, "machine": machine()}
    print(json.dumps(figures, indent=1))
    write_result("soak", figures)


def _prepare_to_fork() -> None:
    """Does once what every start would, and starts no threads."""
    torch.set_num_threads(1)
    warm_up(ShufflerSettings())
    tqdm.monitor_interval = 0  # its thread would not survive a fork


class _Job:
    """The ranks of one start."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / "output.txt"
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.ranks = [
            _fork.Process(target=_run_rank, args=(folder, num_steps, rank, port), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in self.ranks:
            rank.start()

    def wait(self) -> None:
        """Waits for its end."""
        for rank in self.ranks:
            rank.join()
        self.check(ended=True)

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition, which the job has to reach before its end."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not condition():
            self.check(ended=False)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the job hangs:\n{self._log.read_text()}")
            time.sleep(0.001)

    def check(self, ended: bool) -> None:
        """Raises a RuntimeError if a rank has failed, or has ended and should not have."""
        if any(rank.exitcode not in ((0,) if ended else (None,)) for rank in self.ranks):
            raise RuntimeError(f"the job has ended:\n{self._log.read_text()}")

    def kill(self, rng: np.random.Generator) -> None:
        """Kills the ranks in a drawn order, one a little later than the other."""
        for place, rank in enumerate(rng.permutation(RANKS)):
            time.sleep(rng.uniform(0, LONGEST_BETWEEN_RANKS_S) if place else 0)
            self.ranks[rank].kill()
        for process in self.ranks:
            process.join()


def _run_rank(folder: Path, num_steps: int, rank: int, port: int) -> None:
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    settings = {"max_train_iters": num_steps, "eval_interval": EVAL_INTERVAL, "max_eval_iters": 3}
    bindings = [f"TrainerArgs.{name} = {value}" for name, value in settings.items()]
    sys.argv = [
        "soak",
        "--gin-config-file",
        str(Path(__file__).with_name("soak.gin")),
        "--gin-bindings",
        *bindings,
    ]
    run_rank(train)


def _disturb(folder: Path, num_steps: int, kills: int) -> dict[str, int]:
    """Kills a run at drawn moments, lets it end, and returns how many kills interrupted what."""
    rng = np.random.default_rng(0)
    interrupted: Counter[str] = Counter()
    for _ in progress(range(kills), "kill"):
        known = len(_lines(folder))
        job = _Job(folder, num_steps)
        wanted = rng.choice(list(LONGEST_DELAY_S), p=[0.1, 0.3, 0.3, 0.3])
        if wanted != "start":
            steps = int(rng.integers(2, 8))
            job.until(lambda: len(_lines(folder)) >= known + steps)  # noqa: B023  called before the next round
        if wanted in ("evaluation", "checkpoint"):
            job.until(lambda: _doing(folder, known) == wanted)  # noqa: B023
        time.sleep(rng.uniform(0, LONGEST_DELAY_S[wanted]))
        job.check(ended=False)
        interrupted[_doing(folder, known)] += 1
        job.kill(rng)
    _Job(folder, num_steps).wait()
    if left := list((folder / "checkpoints").glob("*.unfinished")):
        raise RuntimeError(f"left behind: {left}")
    return dict(sorted(interrupted.items()))


def _doing(folder: Path, known: int) -> str:
    """Returns what a run with `known` lines of earlier starts is doing."""
    lines = _lines(folder)
    if not any(line["kind"] == "train" for line in lines[known:]):
        return "start"
    if any(folder.glob("checkpoints/*.unfinished")):
        return "checkpoint"
    *_, last = (line for line in lines if line["kind"] != "checkpoint")
    return "evaluation" if last["kind"] == "train" and last["step"] % EVAL_INTERVAL == 0 else "step"


def _lines(folder: Path) -> list[Record]:
    """Returns the whole lines of a run's log; those of steps after the last checkpoint occur twice."""
    log = folder / "logs" / "train.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _results(folder: Path) -> list[tuple[str, int, float]]:
    """Returns kind, step, and loss or AUC of steps and evaluations, in order."""
    figures = {"train": "loss", "eval": "AUC"}
    return [
        (line["kind"], line["step"], line[figures[line["kind"]]])
        for line in _lines(folder)
        if line["kind"] in figures
    ]


def _compare(undisturbed: Path, disturbed: Path, num_steps: int) -> Record:
    """Compares both runs.

    Raises:
        RuntimeError: results of a step differ, or a step is missing.
    """
    expected, results = _results(undisturbed), _results(disturbed)
    different = sorted(set(results) ^ set(expected))
    steps = [step for kind, step, _ in results if kind == "train"]
    left_out = [step for before, step in pairwise([0, *steps]) if step > before + 1]
    if different or left_out or steps[-1] != num_steps:
        raise RuntimeError(f"different results {different}, steps left out before {left_out}")
    return {
        "steps": num_steps,
        "steps_computed_again": len(steps) - num_steps,
        "results_equal_to_the_undisturbed_run": True,
    }


if __name__ == "__main__":
    main()
