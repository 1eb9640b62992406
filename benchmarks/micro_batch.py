"""Steps in micro-batches under a token cap: how balanced they are, and what memory and time they take.

Computed loads of random histories; then the demo's model, trained on two ranks.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.demo.training import Arm, parse_config
from benchmarks.harness import (
    Record,
    cases,
    in_turn,
    machine,
    means,
    measured,
    milliseconds,
    on_ranks,
    speedup_interval,
    spread,
    step_memory,
)
from benchmarks.markdown import Cell, pivot, table
from benchmarks.micro_batch_divisions import (
    DIVISIONS,
    MAX_TOKENS,
    ROWS_PER_RANK,
    Ranks,
    Step,
    draw_steps,
    micro_batch_lower_bound,
    ours,
)
from commons.partition import imbalance, loads, lower_bound, micro_batch_imbalance

RANKS, DRAWS, HIDDEN_SIZES = 8, 20, (128, 1024)
PLANNING_DRAWS = {8: 40, 64: 20, 1024: 3}
# Of the training.
TRAINED_RANKS = 2
TRAINED_ROWS, CAPS, MEASURED_STEPS = (16, 32, 64), (None, 4096, 8192), 3
# Steps with and without micro-batches, in turn.
TIMED_ROWS, TIMED_CAP, TIMED_BLOCKS = 32, 4096, 16


def measure() -> Record:
    """Returns the balance of computed steps, and the memory and time of trained ones."""
    divisions = measured(cases(hidden_size=HIDDEN_SIZES, division=DIVISIONS), _mean, "divisions")
    planned = cases(ranks=PLANNING_DRAWS, hidden_size=HIDDEN_SIZES, equal_size=(True, False))
    return {
        "balance": {
            "ranks": RANKS,
            "rows_per_rank": ROWS_PER_RANK,
            "max_tokens": MAX_TOKENS,
            "draws": DRAWS,
            "divisions": divisions,
            "planning": measured(planned, _planning_of, "planning"),
        },
        "memory": on_ranks(TRAINED_RANKS, train),
        "machine": machine(),
    }


def _mean(hidden_size: int, division: str) -> Record:
    steps = draw_steps(hidden_size, RANKS, DRAWS)
    qualities = [_quality(step, DIVISIONS[division](step)) for step in steps]
    largest = max(each["largest_tokens_over_cap"] for each in qualities)
    return {
        **means(qualities),
        "largest_tokens_of_any_draw_over_cap": round(float(largest), 5),
    }


def _quality(step: Step, ranks: Ranks) -> dict[str, float]:
    """Returns the figures of one step. A micro-batch of one sample counts for no cap."""
    count = len(ranks[0])
    in_all = -(-int(step.tokens.sum()) // MAX_TOKENS)
    several = [samples for rank in ranks for samples in rank if len(samples) > 1]
    tokens = loads(step.tokens, several)
    of_rank = [np.concatenate(rank) for rank in ranks]
    of_ranks = imbalance(step.workloads, of_rank)
    is_even = np.ptp([len(samples) for samples in of_rank]) <= 1
    of_ranks_bound = lower_bound(step.workloads, step.ranks, equal_size=bool(is_even))
    of_micro_batches = micro_batch_imbalance(step.workloads, ranks)
    bound = micro_batch_lower_bound(step.workloads, step.tokens, step.ranks, count, MAX_TOKENS)
    return {
        "micro_batches": step.ranks * count,
        "micro_batches_over_fewest": count / -(-in_all // step.ranks),
        "largest_tokens_over_cap": tokens.max() / MAX_TOKENS,
        "micro_batches_above_cap": int((tokens > MAX_TOKENS).sum()),
        "rank_imbalance": of_ranks,
        "rank_imbalance_over_bound": of_ranks / of_ranks_bound,
        "micro_batch_imbalance": of_micro_batches,
        "micro_batch_imbalance_over_bound": of_micro_batches / bound,
    }


def _planning_of(ranks: int, hidden_size: int, equal_size: bool) -> Record:
    steps = draw_steps(hidden_size, ranks, PLANNING_DRAWS[ranks])
    # Compiled already: the divisions are measured first.
    times = [milliseconds(partial(ours, step, equal_size)) for step in steps]
    return {
        "calls": len(steps),
        "ms_median": round(float(np.median(times)), 3),
    }


def train(device: torch.device) -> Record:
    """Trains the demo's model on a rank, with and without micro-batches."""
    make_task = parse_config("hstu")

    def arm(rows: int, cap: int | None) -> Arm:
        settings = {"train_batch_size": rows, "max_tokens_per_micro_batch": cap}
        balanced = {"enable_balanced_shuffler": True, "balance_partitioner": "refined"}
        made = Arm(make_task, {**balanced, **settings}, device)
        made.run(2, timed=False)
        return made

    def peaks(rows_per_rank: int, max_tokens_per_micro_batch: int | None) -> Record:
        return _peaks(arm(rows_per_rank, max_tokens_per_micro_batch), device)

    of_caps = cases(rows_per_rank=TRAINED_ROWS, max_tokens_per_micro_batch=CAPS)
    found = measured(of_caps, peaks, "memory")
    whole, divided = arm(TIMED_ROWS, None), arm(TIMED_ROWS, TIMED_CAP)
    for each in in_turn([whole, divided], TIMED_BLOCKS, "time"):
        each.run(1)
    reports = [report for block in divided.block_reports for report in block]
    time = {
        "rows_per_rank": TIMED_ROWS,
        "max_tokens_per_micro_batch": TIMED_CAP,
        "micro_batches": spread([report.num_micro_batches for report in reports], 0),
        "seconds_whole": spread(whole.block_seconds),
        "seconds_in_micro_batches": spread(divided.block_seconds),
        "speedup": round(sum(whole.block_seconds) / sum(divided.block_seconds), 4),
        "speedup_interval": speedup_interval(whole.block_seconds, divided.block_seconds),
    }
    return {"ranks": dist.get_world_size(), "peaks": found, "time": time}


def _peaks(arm: Arm, device: torch.device) -> Record:
    """Returns the memory of the rank with the most, in each of some steps."""
    megabytes = []
    for _ in range(MEASURED_STEPS):
        peak = torch.tensor(step_memory(lambda: arm.run(1), device)[1] / 1e6)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        megabytes.append(float(peak))
    reports = [report for block in arm.block_reports for report in block]
    return {
        "peak_megabytes": spread(megabytes, 1),
        "tokens_of_a_rank": spread([int(report.tokens_after.max()) for report in reports], 0),
        "micro_batches": spread([report.num_micro_batches for report in reports], 0),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker. In brackets are figures ÷ their bounds, or the largest."""
    balance: dict[str, Cell] = {
        "d": "{hidden_size}",
        "division": "{division}",
        "micro-batches": "{micro_batches:.1f} ({micro_batches_over_fewest:.2f})",
        "largest ÷ cap": "{largest_tokens_over_cap:.2f} ({largest_tokens_of_any_draw_over_cap:.2f})",
        "above cap": "{micro_batches_above_cap:.2f}",
        "ranks": "{rank_imbalance:.3f} ({rank_imbalance_over_bound:.3f})",
        "k-th micro-batches": "{micro_batch_imbalance:.3f} ({micro_batch_imbalance_over_bound:.3f})",
    }
    planning = pivot(
        figures["balance"]["planning"],
        {"ranks": "{ranks}"},
        lambda record: f"d = {record['hidden_size']}, {'equal' if record['equal_size'] else 'unequal'} rows",
        "{ms_median:.1f}",
    )
    return {
        "micro-batch balance": table(figures["balance"]["divisions"], balance),
        "micro-batch planning": planning,
        "micro-batch memory": _memory_table(figures["memory"]["peaks"]),
        "micro-batch time": "{speedup:.2f}× ({speedup_interval[0]:.2f} to {speedup_interval[1]:.2f})".format(
            **figures["memory"]["time"]
        ),
    }


def _memory_table(peaks: list[Record]) -> str:
    """A row for each number of rows, a column for each cap."""
    tokens = {
        record["rows_per_rank"]: f"{record['tokens_of_a_rank']['median']:,.0f}" for record in reversed(peaks)
    }

    def title(record: Record) -> str:
        cap = record["max_tokens_per_micro_batch"]
        return "whole" if cap is None else f"at most {cap:,} tokens"

    def cell(record: Record) -> str:
        text = "{median:.0f} MB ({min:.0f} to {max:.0f})".format(**record["peak_megabytes"])
        is_whole = record["max_tokens_per_micro_batch"] is None
        return text if is_whole else f"{text} in {record['micro_batches']['median']:.0f}"

    rows: dict[str, Cell] = {
        "rows per rank": "{rows_per_rank}",
        "tokens of a rank": lambda record: tokens[record["rows_per_rank"]],
    }
    return pivot(peaks, rows, title, cell)
