"""Trains on two ranks, of which one is slowed for a while, with workloads and with learned costs.

torchrun --nproc_per_node 2 -m benchmarks.learning.slow_rank OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from benchmarks.demo.models import parse_config
from benchmarks.learning.arms import BALANCED, Arm
from commons.training import rank_process, run_rank

# Twice the demo's rows: in longer steps, turns on the core average out.
FLOPS = BALANCED | {"train_batch_size": 32}
ARMS = {"flops": FLOPS, "learned": FLOPS | {"balance_cost": "learned"}}
SLOW_RANK = 1
# By name: how nice the process is that takes turns with the slow rank on its core (None for no process), and
# the steps of each arm. At equal niceness each gets half. 2 leaves the rank about two thirds.
PHASES: list[tuple[str, int | None, int]] = [
    ("nothing slowed", None, 70),
    ("half", 0, 110),
    ("nothing slowed again", None, 70),
    ("two thirds", 2, 110),
    ("nothing slowed at last", None, 70),
]
STEPS_PER_BLOCK = 2
WARM_UP_STEPS = 4


@contextmanager
def _neighbor(niceness: int | None, core: int) -> Iterator[None]:
    """While active, a process takes turns with what runs on a core."""
    if niceness is None:
        yield
        return
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nos.nice({niceness})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Runs all phases; rank 0 writes what was measured."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank]})
    make_task = parse_config("hstu")
    with rank_process() as device:
        arms = {name: Arm(make_task, settings, device) for name, settings in ARMS.items()}
        for arm in arms.values():
            arm.run(WARM_UP_STEPS)
        in_turn = list(arms.values())
        bar = tqdm(total=sum(steps for _, _, steps in PHASES), unit="step", disable=rank != 0)
        for _, niceness, steps in PHASES:
            with _neighbor(niceness if rank == SLOW_RANK else None, cores[SLOW_RANK]):
                for _ in range(steps // STEPS_PER_BLOCK):
                    for arm in in_turn:
                        arm.run(STEPS_PER_BLOCK)
                    in_turn.append(in_turn.pop(0))
                    bar.update(STEPS_PER_BLOCK)
        measured = {name: arm.measured(WARM_UP_STEPS) for name, arm in arms.items()}
        if rank == 0:
            for arm in measured.values():
                del arm["work"]
            Path(sys.argv[1]).write_text(json.dumps({"phases": PHASES, "arms": measured}))


if __name__ == "__main__":
    run_rank(main)
