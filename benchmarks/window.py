"""Measures the gain of a window with few rows per rank, where one row may outweigh the others.

Trains a wider version of the demo's model on two ranks, with windows of 1 and 4 steps in alternating blocks:

    python -m benchmarks.window
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import os
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.demo.training import Arm
from benchmarks.machine import machine, speedup_interval
from benchmarks.torchrun import torchrun
from commons.training import rank_process, run_rank

RESULT = Path(__file__).parent / "results" / "window.json"
RANKS, ROWS_PER_RANK = 2, 3
# Wider than the demo's: at a width of 128, the CPU's time per FLOP depends on the length.
HIDDEN_SIZE, NUM_HEADS = 256, 4
WINDOW = 4
BLOCKS = 28  # of one window each


def main() -> None:
    """Starts the ranks or, on a rank, runs the benchmark; rank 0 prints and writes the figures."""
    parse_arguments(__doc__)
    if "RANK" not in os.environ:
        torchrun(RANKS, "benchmarks.window")
        return
    make_task = parse_config("hstu")
    gin.bind_parameter("NetworkArgs.hidden_size", HIDDEN_SIZE)
    gin.bind_parameter("NetworkArgs.num_attention_heads", NUM_HEADS)
    with rank_process() as device:
        settings = {"enable_balanced_shuffler": True, "train_batch_size": ROWS_PER_RANK}
        arms = [
            Arm(make_task, {**settings, **of_arm}, device)
            for of_arm in ({"balance_partitioner": "refined"}, {"balance_window": WINDOW})
        ]
        for arm in arms:
            arm.run(WINDOW, timed=False)
        for block in tqdm(range(BLOCKS), desc="train", unit="block", disable=dist.get_rank() != 0):
            for arm in arms if block % 2 else arms[::-1]:
                arm.run(WINDOW, timed=True)
        if dist.get_rank() == 0:
            figures = _figures(*arms)
            print(json.dumps(figures, indent=1))
            RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _figures(one: Arm, several: Arm) -> dict[str, Any]:
    of_one, of_several = (
        [report for block in arm.block_reports for report in block] for arm in (one, several)
    )
    largest = [sum(report.loads_after.max() for report in of_arm) for of_arm in (of_one, of_several)]
    mean = sum(report.loads_before.mean() for report in of_one)
    bound = sum(report.lower_bound * report.loads_after.mean() for report in of_one) / mean
    seconds = [float(np.sum(arm.block_seconds)) for arm in (one, several)]
    speedup, predicted = seconds[0] / seconds[1], largest[0] / largest[1]
    return {
        "ranks": RANKS,
        "rows_per_rank": ROWS_PER_RANK,
        "hidden_size": HIDDEN_SIZE,
        "steps": BLOCKS * WINDOW,
        "lower_bound_of_one_step": round(bound, 4),
        "imbalance": {
            "window 1": round(largest[0] / mean, 4),
            f"window {WINDOW}": round(largest[1] / mean, 4),
        },
        "largest_step_ratio": round(max(report.step_ratio for report in of_several), 3),
        "seconds_per_step": [round(total / BLOCKS, 4) for total in seconds],
        "speedup": round(speedup, 4),
        "speedup_interval": speedup_interval(one.block_seconds, several.block_seconds),
        "speedup_predicted": round(predicted, 4),
        "share_of_predicted_gain": round((speedup - 1) / (predicted - 1), 3),
        "machine": machine(),
    }


if __name__ == "__main__":
    run_rank(main)
