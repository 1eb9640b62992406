"""Computes the loads, rows, and tokens of ranks that pad, by the plans of `Padded`."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import Record, average, list_cases, measure_cases
from benchmarks.markdown import pivot
from benchmarks.partition.placements import (
    KUAIRAND,
    RANKS_PER_NODE,
    ROWS_PER_RANK,
    YAMBDA,
    Lengths,
    list_lengths,
)
from commons.distributed import BalanceReport, ShufflePlan
from commons.distributed.plan import RowTable
from commons.extensions.padded.padded_plan import plan_padded

WIDTH, DRAWS = 256, 200
RANKS, MAX_REAL_TOKENS = (2, 8, 64), 1.3
SHORT = "lognormal(4.2, 1.0) in [20, 200]"
_KNOWN = list_lengths(None)
KINDS: dict[str, Lengths] = {
    SHORT: lambda rng, n: rng.lognormal(4.2, 1.0, n).clip(20, 200).astype(np.int64),
    "Yambda-like, newest 8,192": lambda rng, n: _KNOWN[YAMBDA](rng, n).clip(max=8192),
    "uniform in [1, 4096]": lambda rng, n: rng.integers(1, 4097, n),
    "KuaiRand-like, newest 4,096": lambda rng, n: _KNOWN[KUAIRAND](rng, n).clip(max=4096),
}
BYTES_PER_TOKEN = 16  # an id and a label


def load_rows(lengths: np.ndarray, workloads: np.ndarray, **arguments: Any) -> RowTable:
    """Returns a step in which each rank loaded `ROWS_PER_RANK` of these rows.

    Args:
        lengths, workloads: tokens and cost of each row, int64 `[rows]`.
        arguments: partitioner arguments, as extensions give them.
    """
    per_rank = np.full(len(lengths) // ROWS_PER_RANK, ROWS_PER_RANK)
    none = np.zeros((len(lengths), 0), dtype=np.int64)
    return RowTable(
        batch_sizes=per_rank,
        num_loaded=per_rank,
        workloads=workloads,
        tokens=lengths,
        loss_tokens=lengths,
        key_lengths=none,
        sample_bytes=BYTES_PER_TOKEN * lengths,
        arguments=arguments,
        ranks_per_node=RANKS_PER_NODE if len(per_rank) > RANKS_PER_NODE else None,
    )


def count_flops(lengths: np.ndarray) -> np.ndarray:
    """Returns what each row costs by itself, int64 `[rows]`."""
    return 10 * lengths * WIDTH**2 + 4 * lengths**2 * WIDTH


def measure_plans() -> Record:
    """Returns a record for each kind of lengths and number of ranks."""
    whole = list_cases(lengths=KINDS, ranks=RANKS)
    return {
        "draws": DRAWS,
        "whole": measure_cases(whole, _average, "whole ranks"),
    }


def draw_rows(lengths: str, ranks: int, seed: int) -> RowTable:
    """Returns a step of random rows of this kind."""
    drawn = KINDS[lengths](np.random.default_rng([seed, ranks]), ranks * ROWS_PER_RANK)
    return load_rows(drawn, count_flops(drawn))


def _average(lengths: str, ranks: int) -> Record:
    """Returns each figure's mean over draws."""
    return average([assess_whole(draw_rows(lengths, ranks, seed)) for seed in range(DRAWS)])


def assess_whole(rows: RowTable) -> Record:
    """Returns the figures of a step whose ranks run whole batches."""
    plan, limited = plan_padded(rows), plan_padded(rows, max_real_tokens=MAX_REAL_TOKENS)
    report, of_limited = (BalanceReport.of(each, False) for each in (plan, limited))
    return {
        "as_loaded": report.imbalance_before,
        "padded": report.imbalance_after,
        "padded_tokens": fullest(plan, plan.destination) / fullest(plan, rows.home),
        "fewest_rows": plan.num_placed.min(),
        "most_rows": plan.num_placed.max(),
        "real_tokens_as_loaded": report.token_imbalance_before,
        "real_tokens": report.token_imbalance_after,
        "limited": of_limited.imbalance_after,
        "limited_real_tokens": of_limited.token_imbalance_after,
        "samples_moved": report.samples_moved / len(rows.tokens),
        "bytes_moved": report.bytes_moved / report.bytes_loaded,
    }


def fullest(plan: ShufflePlan, rank_of: np.ndarray) -> int:
    """Returns the padded tokens of the fullest rank, if rows are on these ranks, int64 `[rows]`."""
    longest = np.zeros(plan.num_ranks, dtype=np.int64)
    np.maximum.at(longest, rank_of, plan.rows.tokens)
    return int((longest * np.bincount(rank_of, minlength=plan.num_ranks)).max())


def tabulate_plans(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker. Cells list numbers of ranks."""
    whole = [record | {"speedup": record["as_loaded"] / record["padded"]} for record in figures["whole"]]
    return {
        "padded balance": tabulate_ranks(whole, _BALANCE),
        "padded side effects": tabulate_ranks(whole, _SIDE_EFFECTS),
        "padded draws": f"{figures['draws']} draws",
    }


_BALANCE = {
    "as loaded": "{as_loaded:.2f}",
    "`Padded`": "{padded:.2f}",
    "speedup, at most": "{speedup:.1f}",
    "fullest": "{padded_tokens:.2f}",
    "rows per rank": "{fewest_rows:.0f}–{most_rows:.0f}",
}
_SIDE_EFFECTS = {
    "real tokens, as loaded": "{real_tokens_as_loaded:.2f}",
    "real tokens": "{real_tokens:.2f}",
    "samples moved": "{samples_moved:.0%}",
    "bytes moved": "{bytes_moved:.0%}",
    "limited: real tokens": "{limited_real_tokens:.2f}",
    "limited: imbalance": "{limited:.2f}",
}


def tabulate_ranks(records: list[Record], columns: dict[str, str]) -> str:
    """Returns a table with a row for each kind of lengths. A cell lists the figures of `RANKS`."""
    cells: list[dict[str, Any]] = [
        {"lengths": record["lengths"], "title": title, "text": cell.format_map(record)}
        for record in records
        for title, cell in columns.items()
    ]
    return pivot(cells, {"lengths": "{lengths}"}, "{title}", "{text}")
