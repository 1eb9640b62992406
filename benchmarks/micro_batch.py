"""Measures steps in micro-batches under a token cap: the time to plan them, their memory, and their time."""

from __future__ import annotations

from functools import partial

import numpy as np
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
    time_in_turns,
    train_in_turn,
)
from benchmarks.markdown import pivot
from benchmarks.partition.placements import GlobalBatch, draw_batches, draw_lognormal
from commons.extensions.micro_batches.division import number_micro_batches
from commons.extensions.micro_batches.packing import check_samples
from commons.partition import rebalance

MAX_TOKENS, HIDDEN_SIZES = 8192, (128, 1024)
DRAWS = {8: 40, 64: 20, 1024: 3}  # by number of ranks
# Training runs whose memory is measured.
TRAINED_RANKS = 2
TRAINED_ROWS, CAPS, MEASURED_STEPS = (16, 32, 64), (None, 4096, 8192), 3
# Alternating steps with and without micro-batches, whose times are compared.
TIMED_ROWS, TIMED_CAP, TIMED_BLOCKS = 32, 4096, 16


def measure() -> Record:
    """Returns the time of plans, and the memory and time of training steps."""
    planned = list_cases(ranks=DRAWS, hidden_size=HIDDEN_SIZES)
    return {
        "planning": measure_cases(planned, _time_planning, "planning"),
        **run_on_ranks(TRAINED_RANKS, train),
    }


def _time_planning(ranks: int, hidden_size: int) -> Record:
    steps = draw_batches(draw_lognormal, hidden_size, ranks, DRAWS[ranks])
    times = time_in_turns({"plan": _plan}, 1, [(step,) for step in steps])["plan"]
    return {"ms_median": round(float(np.median(times)), 3)}


def _plan(step: GlobalBatch) -> None:
    """Places samples with `rebalance`, and numbers their micro-batches as a plan of `MicroBatches` does."""
    rank_of = rebalance.part_of(step.workloads, step.home, step.ranks, sizes=step.sizes)  # type: ignore[attr-defined]
    work, tokens, cap = check_samples(step.workloads, step.tokens, MAX_TOKENS)
    number_micro_batches(work, tokens, cap, rank_of, step.ranks)


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
        "micro-batch planning": pivot(
            figures["planning"], {"ranks": "{ranks}"}, "d = {hidden_size}", "{ms_median:.1f}"
        ),
        "micro-batch memory": pivot(figures["peaks"], {"rows per rank": "{rows_per_rank}"}, _title, peak),
        "micro-batch time": time.format(**figures["time"]),
    }


def _title(record: Record) -> str:
    cap = record["max_tokens_per_micro_batch"]
    return "whole" if cap is None else f"at most {cap:,} tokens"
