"""How well the ways to divide a step balance it, and how long ours takes to plan."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.markdown import markdown_table
from benchmarks.micro_batch.bound import micro_batch_lower_bound
from benchmarks.micro_batch.divisions import (
    DIVISIONS,
    MAX_TOKENS,
    ROWS_PER_RANK,
    Ranks,
    Step,
    draw_steps,
    ours,
)
from commons.partition import imbalance, loads, lower_bound, micro_batch_imbalance

Record = dict[str, Any]

RANKS, DRAWS, HIDDEN_SIZES = 8, 20, (128, 1024)
PLANNING_DRAWS = {8: 40, 64: 20, 1024: 3}


def measure() -> dict[str, Any]:
    """Records for each hidden size and division, means over the draws; and of planning times."""
    return {
        "ranks": RANKS,
        "rows_per_rank": ROWS_PER_RANK,
        "max_tokens": MAX_TOKENS,
        "draws": DRAWS,
        "divisions": [_mean(size, name) for size in HIDDEN_SIZES for name in DIVISIONS],
        "planning": _planning(),
    }


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """By name; lines of Markdown."""
    return {
        "balance": _balance_table(figures["divisions"]),
        "planning": _planning_table(figures["planning"]),
    }


def _mean(hidden_size: int, name: str) -> Record:
    steps = draw_steps(hidden_size, RANKS, DRAWS)
    qualities = [_quality(step, DIVISIONS[name](step)) for step in steps]
    means = {key: round(float(np.mean([each[key] for each in qualities])), 5) for key in qualities[0]}
    largest = max(each["largest_tokens_over_cap"] for each in qualities)
    return {
        "hidden_size": hidden_size,
        "division": name,
        **means,
        "largest_tokens_of_any_draw_over_cap": round(float(largest), 5),
    }


def _quality(step: Step, ranks: Ranks) -> dict[str, float]:
    """Returns the figures of one step. A micro-batch of one sample counts for no cap."""
    count = len(ranks[0])
    in_all = -(-int(step.tokens.sum()) // MAX_TOKENS)
    several = [samples for rank in ranks for samples in rank if len(samples) > 1]
    tokens = loads(step.tokens, several)
    on_ranks = [np.concatenate(rank) for rank in ranks]
    of_ranks = imbalance(step.workloads, on_ranks)
    is_even = np.ptp([len(samples) for samples in on_ranks]) <= 1
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


def _planning() -> list[Record]:
    """A record for each number of ranks, hidden size and rows equal or not."""
    cases = list(product(PLANNING_DRAWS, HIDDEN_SIZES, (True, False)))
    return [_planning_of(*case) for case in tqdm(cases, desc="planning")]


def _planning_of(ranks: int, hidden_size: int, equal_size: bool) -> Record:
    steps = draw_steps(hidden_size, ranks, PLANNING_DRAWS[ranks])
    milliseconds = []
    for step in steps:
        start = time.perf_counter()
        ours(step, equal_size)  # compiled already: the divisions are measured first
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {
        "ranks": ranks,
        "hidden_size": hidden_size,
        "equal_size": equal_size,
        "calls": len(steps),
        "ms_median": round(float(np.median(milliseconds)), 3),
    }


def _balance_table(records: list[Record]) -> str:
    """A row for each hidden size and division; in brackets figures ÷ their bounds, or the largest."""

    def largest(record: Record) -> str:
        keys = ("largest_tokens_over_cap", "largest_tokens_of_any_draw_over_cap")
        return "{:.2f} ({:.2f})".format(*(record[key] for key in keys))

    def with_bound(record: Record, key: str) -> str:
        return f"{record[key]:.3f} ({record[f'{key}_over_bound']:.3f})"

    rows = [
        [
            f"{record['hidden_size']}",
            record["division"],
            f"{record['micro_batches']:.1f} ({record['micro_batches_over_fewest']:.2f})",
            largest(record),
            f"{record['micro_batches_above_cap']:.2f}",
            with_bound(record, "rank_imbalance"),
            with_bound(record, "micro_batch_imbalance"),
        ]
        for record in records
    ]
    titles = ["micro-batches", "largest ÷ cap", "above cap", "ranks", "k-th micro-batches"]
    return markdown_table(["d", "division", *titles], rows)


def _planning_table(records: list[Record]) -> str:
    """A row for each number of ranks, a column for each hidden size and rows equal or not."""
    cells: dict[int, dict[str, str]] = {}
    for record in records:
        title = f"d = {record['hidden_size']}, {'equal' if record['equal_size'] else 'unequal'} rows"
        cells.setdefault(record["ranks"], {})[title] = f"{record['ms_median']:.1f}"
    titles = list(next(iter(cells.values())))
    rows = [[f"{ranks}", *of_ranks.values()] for ranks, of_ranks in cells.items()]
    return markdown_table(["ranks", *titles], rows)
