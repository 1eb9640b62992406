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

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.learning.arms import BALANCED, Arm
from commons.training import rank_process, run_rank

# Twice the demo's rows: in longer steps, turns on the core average out.
FLOPS = BALANCED | {"train_batch_size": 32}
ARMS = {"flops": FLOPS, "learned": FLOPS | {"balance_cost": "learned"}}
SLOW_RANK = 1
# By name: how nice the processes are that take turns with the slow rank on its core, and the steps of each
# arm. One at niceness 0 leaves it half of the core, but 0.55 of the other rank's speed: that drops, too.
PHASES: list[tuple[str, tuple[int, ...], int]] = [
    ("nothing slowed", (), 70),
    ("half", (0, 8), 110),
    ("nothing slowed again", (), 70),
    ("two thirds", (2,), 110),
    ("nothing slowed at last", (), 70),
]
STEPS_PER_BLOCK = 2
WARM_UP_STEPS = 4


@contextmanager
def _neighbors(nicenesses: tuple[int, ...], core: int) -> Iterator[None]:
    """While active, processes take turns with what runs on a core."""
    program = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.nice(int(sys.argv[1]))\nwhile True: pass"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(nice)]) for nice in nicenesses]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Runs all phases; rank 0 writes what was measured."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
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
        for _, nicenesses, steps in PHASES:
            with _neighbors(nicenesses if rank == SLOW_RANK else (), cores[SLOW_RANK]):
                for _ in range(steps // STEPS_PER_BLOCK):
                    for arm in in_turn:
                        arm.run(STEPS_PER_BLOCK)
                    in_turn.append(in_turn.pop(0))
                    bar.update(STEPS_PER_BLOCK)
        measured = {name: arm.measured(WARM_UP_STEPS) for name, arm in arms.items()}
        if rank == 0:
            output.write_text(json.dumps({"phases": PHASES, "arms": measured}))


if __name__ == "__main__":
    run_rank(main)
