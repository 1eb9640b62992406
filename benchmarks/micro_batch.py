"""Measures the balance, memory, and time of steps in micro-batches under a token cap.

The balance is computed for random histories. The demo's model on two ranks shows the memory and time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.demo.training import Arm, compare_times, parse_config, train_in_turn
from benchmarks.harness import (
    Record,
    average,
    list_cases,
    measure_cases,
    measure_step_memory,
    run_on_ranks,
    summarize,
    time_ms,
)
from benchmarks.markdown import Cell, make_table, pivot
from benchmarks.micro_batch_divisions import (
    DIVISIONS,
    MAX_TOKENS,
    Ranks,
    divide_evenly,
    draw_rounded,
    micro_batch_lower_bound,
)
from benchmarks.partition.placements import GlobalBatch, draw_batches
from commons.extensions.micro_batches import micro_batch_imbalance
from commons.extensions.micro_batches.division import number_micro_batches
from commons.extensions.micro_batches.packing import check_samples
from commons.partition import imbalance, loads, lower_bound, rebalance

RANKS, DRAWS, HIDDEN_SIZES = 8, 20, (128, 1024)
PLANNING_DRAWS = {8: 40, 64: 20, 1024: 3}
# Training runs whose memory is measured.
TRAINED_RANKS = 2
TRAINED_ROWS, CAPS, MEASURED_STEPS = (16, 32, 64), (None, 4096, 8192), 3
# Alternating steps with and without micro-batches, whose times are compared.
TIMED_ROWS, TIMED_CAP, TIMED_BLOCKS = 32, 4096, 16


def measure() -> Record:
    """Returns the balance of computed steps, and the memory and time of training steps."""
    divisions = measure_cases(
        list_cases(hidden_size=HIDDEN_SIZES, division=DIVISIONS), _average_draws, "divisions"
    )
    planned = list_cases(planned_by=PLANNED_BY, ranks=PLANNING_DRAWS, hidden_size=HIDDEN_SIZES)
    return {
        "balance": {
            "divisions": divisions,
            "planning": measure_cases(planned, _time_planning, "planning"),
        },
        "memory": run_on_ranks(TRAINED_RANKS, train),
    }


def _average_draws(hidden_size: int, division: str) -> Record:
    steps = draw_batches(draw_rounded, hidden_size, RANKS, DRAWS)
    return average([_assess(step, DIVISIONS[division](step)) for step in steps])


def _assess(step: GlobalBatch, ranks: Ranks) -> dict[str, float]:
    """Returns the figures of one step. A micro-batch of one sample never counts as above the cap."""
    count = len(ranks[0])
    several = [samples for rank in ranks for samples in rank if len(samples) > 1]
    tokens = loads(step.tokens, several)
    samples_of_ranks = [np.concatenate(rank) for rank in ranks]
    rank_imbalance = imbalance(step.workloads, samples_of_ranks)
    is_even = np.ptp([len(samples) for samples in samples_of_ranks]) <= 1
    rank_bound = lower_bound(step.workloads, step.ranks, equal_size=bool(is_even))
    k_th_imbalance = micro_batch_imbalance(step.workloads, ranks)
    bound = micro_batch_lower_bound(step.workloads, step.tokens, step.ranks, count, MAX_TOKENS)
    return {
        "micro_batches": step.ranks * count,
        "micro_batches_above_cap": int((tokens > MAX_TOKENS).sum()),
        "rank_imbalance": rank_imbalance,
        "rank_imbalance_over_bound": rank_imbalance / rank_bound,
        "micro_batch_imbalance": k_th_imbalance,
        "micro_batch_imbalance_over_bound": k_th_imbalance / bound,
    }


def _time_planning(planned_by: str, ranks: int, hidden_size: int) -> Record:
    steps = draw_batches(draw_rounded, hidden_size, ranks, PLANNING_DRAWS[ranks])
    # Numba has compiled all functions by now, because the divisions are measured first.
    times = [time_ms(partial(PLANNED_BY[planned_by], step)) for step in steps]
    return {"ms_median": round(float(np.median(times)), 3)}


def _plan_for_a_pipeline(step: GlobalBatch) -> None:
    """Places samples with `rebalance`, and numbers their micro-batches as a plan of `MicroBatches` does."""
    rank_of = rebalance.part_of(step.workloads, step.home, step.ranks, sizes=step.sizes)  # type: ignore[attr-defined]
    work, tokens, cap = check_samples(step.workloads, step.tokens, MAX_TOKENS)
    number_micro_batches(work, tokens, cap, rank_of, step.ranks)


# Planning functions by their names in the table.
PLANNED_BY: dict[str, Callable[[GlobalBatch], Any]] = {
    "`MicroBatches`, in pipelines": _plan_for_a_pipeline,
    "`refined`, then `pack_micro_batches`": partial(divide_evenly, equal_size=True),
}


def train(device: torch.device) -> Record:
    """Trains the demo's model on this rank, with and without micro-batches."""
    make_task = parse_config("hstu")

    def make_arm(rows: int, cap: int | None) -> Arm:
        settings = {"train_batch_size": rows, "max_tokens_per_micro_batch": cap}
        balanced = {"enable_balanced_shuffler": True, "balance_partitioner": "refined"}
        return Arm(make_task, {**balanced, **settings}, device)

    def measure_peaks(rows_per_rank: int, max_tokens_per_micro_batch: int | None) -> Record:
        arm = make_arm(rows_per_rank, max_tokens_per_micro_batch)
        arm.run(2, timed=False)
        return _measure_peaks(arm, device)

    cases = list_cases(rows_per_rank=TRAINED_ROWS, max_tokens_per_micro_batch=CAPS)
    found = measure_cases(cases, measure_peaks, "memory")
    whole, divided = make_arm(TIMED_ROWS, None), make_arm(TIMED_ROWS, TIMED_CAP)
    train_in_turn([whole, divided], TIMED_BLOCKS, "time")
    return {"peaks": found, "time": compare_times(whole, divided)}


def _measure_peaks(arm: Arm, device: torch.device) -> Record:
    """Returns the peak memory of the rank with the largest peak, over `MEASURED_STEPS` steps."""
    megabytes = []
    for _ in range(MEASURED_STEPS):
        peak = torch.tensor(measure_step_memory(lambda: arm.run(1), device)[1] / 1e6)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        megabytes.append(float(peak))
    return {"peak_megabytes": summarize(megabytes, 1)}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker. Figures in parentheses are ÷ their bounds."""
    balance: dict[str, Cell] = {
        "d": "{hidden_size}",
        "division": "{division}",
        "micro-batches": "{micro_batches:.1f}",
        "above cap": "{micro_batches_above_cap:.2f}",
        "ranks": "{rank_imbalance:.3f} ({rank_imbalance_over_bound:.3f})",
        "k-th micro-batches": "{micro_batch_imbalance:.3f} ({micro_batch_imbalance_over_bound:.3f})",
    }
    rows = {"ranks": "{ranks}", "planned by": "{planned_by}"}
    planning = pivot(figures["balance"]["planning"], rows, "d = {hidden_size}", "{ms_median:.1f}")
    return {
        "micro-batch balance": make_table(figures["balance"]["divisions"], balance),
        "micro-batch planning": planning,
        "micro-batch memory": _tabulate_memory(figures["memory"]["peaks"]),
        "micro-batch time": "{speedup:.2f}× ({speedup_interval[0]:.2f} to {speedup_interval[1]:.2f})".format(
            **figures["memory"]["time"]
        ),
    }


def _tabulate_memory(peaks: list[Record]) -> str:
    """Returns a table with a row for each number of rows, and a column for each cap."""

    def title(record: Record) -> str:
        cap = record["max_tokens_per_micro_batch"]
        return "whole" if cap is None else f"at most {cap:,} tokens"

    cell = "{peak_megabytes[median]:.0f} MB ({peak_megabytes[min]:.0f} to {peak_megabytes[max]:.0f})"
    return pivot(peaks, {"rows per rank": "{rows_per_rank}"}, title, cell)
