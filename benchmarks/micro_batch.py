"""Measures the memory and the time of steps in micro-batches under a token cap."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from benchmarks.demo.training import make_arm, parse_config
from benchmarks.harness import (
    Arm,
    Record,
    compare_times,
    list_cases,
    measure_cases,
    measure_step_memory,
    run_on_ranks,
    summarize,
    train_in_turn,
)
from benchmarks.markdown import pivot

# Training runs whose memory is measured.
TRAINED_RANKS = 2
TRAINED_ROWS, CAPS, MEASURED_STEPS = (16, 32, 64), (None, 4096, 8192), 3
# Alternating steps with and without micro-batches, whose times are compared.
TIMED_ROWS, TIMED_CAP, TIMED_BLOCKS = 32, 4096, 16


def measure() -> Record:
    """Returns the memory and time of training steps."""
    return run_on_ranks(TRAINED_RANKS, train)


def train(device: torch.device) -> Record:
    """Trains the demo's model on this rank, with and without micro-batches."""
    make_task = parse_config("hstu")

    def make(rows: int, cap: int | None) -> Arm:
        settings = {"train_batch_size": rows, "max_tokens_per_micro_batch": cap}
        balanced = {"enable_balanced_shuffler": True, "balance_partitioner": "refined"}
        return make_arm(make_task, {**balanced, **settings}, device)

    def measure_peaks(rows_per_rank: int, max_tokens_per_micro_batch: int | None) -> Record:
        arm = make(rows_per_rank, max_tokens_per_micro_batch)
        arm.run(2, timed=False)
        peaks = [_measure_peak(arm) for _ in range(MEASURED_STEPS)]
        return {"peak_megabytes": summarize(peaks, 1)}

    cases = list_cases(rows_per_rank=TRAINED_ROWS, max_tokens_per_micro_batch=CAPS)
    found = measure_cases(cases, measure_peaks, "memory")
    whole, divided = make(TIMED_ROWS, None), make(TIMED_ROWS, TIMED_CAP)
    train_in_turn([whole, divided], TIMED_BLOCKS, "time")
    return {"peaks": found, "time": compare_times(whole, divided)}


def _measure_peak(arm: Arm) -> float:
    """Returns the peak megabytes of a step on the rank with the largest peak. Collective."""
    peak = torch.tensor(measure_step_memory(partial(arm.run, 1)) / 1e6)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    peak = "{peak_megabytes[median]:.0f} MB ({peak_megabytes[min]:.0f} to {peak_megabytes[max]:.0f})"
    time = "{speedup:.2f}× ({speedup_interval[0]:.2f} to {speedup_interval[1]:.2f})"
    return {
        "micro-batch memory": pivot(figures["peaks"], {"rows per rank": "{rows_per_rank}"}, _title, peak),
        "micro-batch time": time.format(**figures["time"]),
    }


def _title(record: Record) -> str:
    cap = record["max_tokens_per_micro_batch"]
    return "whole" if cap is None else f"at most {cap:,} tokens"
