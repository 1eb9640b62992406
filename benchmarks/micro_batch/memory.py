"""The memory of a training step, and its time, with and without micro-batches: the demo's model on two ranks.

torchrun --nproc_per_node 2 -m benchmarks.micro_batch.memory OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.demo.training import Arm
from benchmarks.machine import speedup_interval, spread
from benchmarks.markdown import markdown_table
from commons.training import rank_process, run_rank

RANKS = 2
ROWS_PER_RANK = (16, 32, 64)
CAPS = (None, 4096, 8192)
MEASURED_STEPS = 3
# Steps with and without micro-batches, in turn.
TIMED_ROWS, TIMED_CAP, TIMED_BLOCKS = 32, 4096, 16


def main() -> None:
    """Runs all arms; rank 0 writes the figures."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    make_task = parse_config("hstu")
    with rank_process() as device:

        def arm(rows: int, cap: int | None) -> Arm:
            settings = {"train_batch_size": rows, "max_tokens_per_micro_batch": cap}
            balanced = {"enable_balanced_shuffler": True, "balance_partitioner": "refined"}
            made = Arm(make_task, {**balanced, **settings}, device)
            made.run(2, timed=False)
            return made

        cases = [(rows, cap) for rows in ROWS_PER_RANK for cap in CAPS]
        peaks = [
            _peaks(arm(rows, cap), rows, cap)
            for rows, cap in tqdm(cases, desc="memory", disable=dist.get_rank() != 0)
        ]
        whole, divided = arm(TIMED_ROWS, None), arm(TIMED_ROWS, TIMED_CAP)
        for block in tqdm(range(TIMED_BLOCKS), desc="time", disable=dist.get_rank() != 0):
            for timed in (whole, divided) if block % 2 else (divided, whole):
                timed.run(1, timed=True)
        if dist.get_rank() == 0:
            figures = {"ranks": dist.get_world_size(), "peaks": peaks, "time": _time(whole, divided)}
            output.write_text(json.dumps(figures))


def table(figures: dict[str, Any]) -> str:
    """A row for each number of rows, a column for each cap."""
    cells: dict[int, dict[str, str]] = {}
    for record in figures["peaks"]:
        cap = record["max_tokens_per_micro_batch"]
        title = "whole" if cap is None else f"at most {cap:,} tokens"
        peak, count = record["peak_megabytes"], record["micro_batches"]["median"]
        text = f"{peak['median']:.0f} MB ({peak['min']:.0f} to {peak['max']:.0f})"
        of_rows = cells.setdefault(record["rows_per_rank"], {})
        of_rows["tokens of a rank"] = f"{record['tokens_of_a_rank']['median']:,.0f}"
        of_rows[title] = text if cap is None else f"{text} in {count:.0f}"
    rows = [[f"{rows}", *of_rows.values()] for rows, of_rows in cells.items()]
    return markdown_table(["rows per rank", *next(iter(cells.values()))], rows)


def _peaks(arm: Arm, rows: int, cap: int | None) -> dict[str, Any]:
    """Returns the memory of the rank with the most, in each of some steps."""
    megabytes = []
    for _ in range(MEASURED_STEPS):
        peak = torch.tensor(step_memory(lambda: arm.run(1, timed=True))[1] / 1e6)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        megabytes.append(float(peak))
    reports = [report for block in arm.block_reports for report in block]
    return {
        "rows_per_rank": rows,
        "max_tokens_per_micro_batch": cap,
        "peak_megabytes": spread(megabytes, 1),
        "tokens_of_a_rank": spread([int(report.tokens_after.max()) for report in reports], 0),
        "micro_batches": spread([report.num_micro_batches for report in reports], 0),
    }


def step_memory(run: Callable[[], None]) -> tuple[int, int]:
    """Returns the bytes that torch had allocated when a step's backward began, and the most in the step, both
    beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    allocated = peak = kept = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith("## backward"):
            kept = allocated
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return kept, peak


def _time(whole: Arm, divided: Arm) -> dict[str, Any]:
    reports = [report for block in divided.block_reports for report in block]
    return {
        "rows_per_rank": TIMED_ROWS,
        "max_tokens_per_micro_batch": TIMED_CAP,
        "micro_batches": spread([report.num_micro_batches for report in reports], 0),
        "seconds_whole": spread(whole.block_seconds),
        "seconds_in_micro_batches": spread(divided.block_seconds),
        "speedup": round(sum(whole.block_seconds) / sum(divided.block_seconds), 4),
        "speedup_interval": speedup_interval(whole.block_seconds, divided.block_seconds),
    }


if __name__ == "__main__":
    run_rank(main)
