"""Kills ranks of a training run at random, and checks that its losses match an undisturbed run.

Runs two ranks under torchrun, which restarts them. Every third kill hits while a checkpoint is written:

    python -m benchmarks.soak [KILLS]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine

BENCHMARKS = Path(__file__).parent
RESULT = BENCHMARKS / "results" / "soak.json"
KILLS, STEPS_PER_KILL, RANKS = 20, 12, 2
LONGEST_WAIT_S = 300.0

Step = tuple[int, float]  # number and loss


def main() -> None:
    """Runs undisturbed and disturbed, compares both, prints the figures and writes them to `RESULT`."""
    kills: int = parse_arguments(__doc__, kills={"type": int, "nargs": "?", "default": KILLS}).kills
    num_steps = STEPS_PER_KILL * (kills + 2)
    with TemporaryDirectory() as folder:
        undisturbed, disturbed = Path(folder) / "undisturbed", Path(folder) / "disturbed"
        _wait(_start(undisturbed, num_steps, restarts=0))
        job = _start(disturbed, num_steps, restarts=kills)
        hits = _disturb(job, disturbed, kills)
        _wait(job)
        figures = _compare(_steps(undisturbed), _steps(disturbed), num_steps)
    figures |= {"kills": hits, "ranks": RANKS, "machine": machine()}
    print(json.dumps(figures, indent=1))
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _start(folder: Path, num_steps: int, restarts: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    settings = ["--gin-config-file", str(BENCHMARKS / "soak.gin")]
    settings += ["--gin-bindings", f"TrainerArgs.max_train_iters = {num_steps}"]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, f"--max-restarts={restarts}", "-m", "hstu.training.pretrain_gr_ranking", *settings],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(job: subprocess.Popen[bytes]) -> None:
    if job.wait() != 0:
        raise RuntimeError(f"the job ended with exit code {job.returncode}")


def _disturb(job: subprocess.Popen[bytes], folder: Path, kills: int) -> list[dict[str, Any]]:
    """Kills a random rank a random number of steps after each start, and returns the kills."""
    rng = np.random.default_rng(0)
    hits = []
    for number in tqdm(range(kills), desc="kill"):
        while_writing = number % 3 == 2
        before = len(_steps(folder))
        wanted = before + int(rng.integers(1, STEPS_PER_KILL))
        _until(lambda: len(_steps(folder)) >= wanted, job)  # noqa: B023  called before the next round
        if while_writing:
            _until(lambda: any(folder.glob("checkpoints/*.unfinished")), job)
        ranks = _children(job.pid)
        victim = int(rng.integers(len(ranks)))
        os.kill(ranks[victim], signal.SIGKILL)
        hits.append({"behind_step": _steps(folder)[-1][0], "rank": victim, "while_writing": while_writing})
        _until(lambda: not set(ranks) & set(_children(job.pid)), job)  # noqa: B023
    return hits


def _until(condition: Any, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job has ended or hangs: exit code {job.returncode}")
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    """Returns the children of a process, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def _steps(folder: Path) -> list[Step]:
    """Returns the computed steps in order; steps after the last checkpoint occur twice."""
    log = folder / "logs" / "train.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def _compare(undisturbed: list[Step], disturbed: list[Step], num_steps: int) -> dict[str, Any]:
    """Compares both runs.

    Raises:
        RuntimeError: losses of a step differ, or a step is missing.
    """
    expected = dict(undisturbed)
    different = [step for step, loss in disturbed if loss != expected[step]]
    numbers = [step for step, _ in disturbed]
    left_out = [step for before, step in zip([0, *numbers], numbers, strict=False) if step > before + 1]
    if different or left_out or numbers[-1] != num_steps:
        raise RuntimeError(f"different losses in steps {different}, steps left out before {left_out}")
    resumed = sum(step <= before for before, step in pairwise(numbers))
    return {
        "steps": num_steps,
        "steps_computed_again": len(numbers) - num_steps,
        "starts_that_went_back": resumed,
        "losses_equal_to_the_undisturbed_run": True,
    }


if __name__ == "__main__":
    main()
