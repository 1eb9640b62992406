"""Computes the loads, rows, and tokens of ranks that pad, by the plans of `Padded`, and the time to plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Record, list_cases, measure_cases, time_ms
from benchmarks.markdown import make_table, pivot
from benchmarks.padded.lengths import KINDS, load_rows
from benchmarks.partition.placements import ROWS_PER_RANK
from commons.distributed import BalanceReport, ShufflePlan
from commons.distributed.plan import RowTable
from commons.extensions.padded.padded_plan import plan_padded

WIDTH, DRAWS = 256, 200
RANKS, MAX_REAL_TOKENS = (2, 8, 64), 1.3
PARTS = {2: 4, 8: 2}  # micro-batches of each rank, by ranks
TIMED_RANKS, TIMED_CALLS = (64, 1024), 40


def count_flops(lengths: np.ndarray) -> np.ndarray:
    """Returns what each row costs by itself, int64 `[rows]`."""
    return 10 * lengths * WIDTH**2 + 4 * lengths**2 * WIDTH


def measure_plans(draws: int = DRAWS) -> Record:
    """Returns records of whole ranks, of ranks in micro-batches, and of the time to plan."""
    return {
        "draws": draws,
        "whole": measure_cases(
            list_cases(lengths=KINDS, ranks=RANKS), partial(_average, draws, assess_whole), "whole ranks"
        ),
        "parts": measure_cases(
            list_cases(lengths=KINDS, ranks=PARTS), partial(_average, draws, assess_parts), "micro-batches"
        ),
        "planning": measure_cases(list_cases(lengths=KINDS, ranks=TIMED_RANKS), _time_planning, "planning"),
    }


def draw_rows(lengths: str, ranks: int, seed: int) -> RowTable:
    """Returns a step of random rows of this kind."""
    drawn = KINDS[lengths](np.random.default_rng([seed, ranks]), ranks * ROWS_PER_RANK)
    return load_rows(drawn, count_flops(drawn))


def _average(draws: int, assess: Callable[[RowTable], Record], lengths: str, ranks: int) -> Record:
    """Returns each figure's mean over draws, and under "errors" its standard error."""
    records = [assess(draw_rows(lengths, ranks, seed)) for seed in range(draws)]
    table = np.array([list(record.values()) for record in records])
    errors = table.std(0, ddof=1) / np.sqrt(draws)

    def name(values: np.ndarray) -> Record:
        return dict(zip(records[0], values.round(5).tolist(), strict=True))

    return name(table.mean(0)) | {"errors": name(errors)}


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


def assess_parts(rows: RowTable) -> Record:
    """Returns the imbalances of a step whose ranks run micro-batches, and of whole ranks beside it."""
    num_parts = PARTS[rows.num_ranks]
    arms = {
        "as_loaded": plan_padded(rows, exchanges=False),
        "cut_as_loaded": plan_in_parts(rows, num_parts, exchanges=False),
        "whole": plan_padded(rows),
        "parts": plan_in_parts(rows, num_parts),
    }
    return {name: BalanceReport.of(plan, False).imbalance_after for name, plan in arms.items()}


def plan_in_parts(rows: RowTable, num_parts: int, exchanges: bool = True) -> ShufflePlan:
    """Returns the plan with the largest token cap that takes this number of micro-batches."""

    def plan(cap: int) -> ShufflePlan:
        return plan_padded(_with_cap(rows, cap), exchanges=exchanges)

    low, high = 1, int(rows.tokens.max()) * len(rows.tokens)  # more parts than `num_parts - 1`; one part
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle).num_parts >= num_parts else (low, middle)
    return plan(low)


def _with_cap(rows: RowTable, cap: int) -> RowTable:
    return load_rows(rows.tokens, rows.workloads, micro_batch_tokens=cap)


def _time_planning(lengths: str, ranks: int) -> Record:
    """Returns the median CPU time of a plan in milliseconds."""
    steps = [draw_rows(lengths, ranks, seed) for seed in range(TIMED_CALLS)]
    times = [time_ms(partial(plan_padded, rows), time.process_time) for rows in steps]
    return {"ms": round(float(np.median(times)), 3)}


def tabulate_plans(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker. Cells list numbers of ranks."""
    whole = [record | {"speedup": record["as_loaded"] / record["padded"]} for record in figures["whole"]]
    parts = [record | {"parts_per_rank": PARTS[record["ranks"]]} for record in figures["parts"]]
    planning = pivot(figures["planning"], {"lengths": "{lengths}"}, "{ranks:,} ranks, ms", "{ms:.2f}")
    errors = max(map(_largest_error, figures["whole"] + figures["parts"]))
    return {
        "padded balance": tabulate_ranks(whole, _BALANCE),
        "padded side effects": tabulate_ranks(whole, _SIDE_EFFECTS),
        "padded micro-batches": make_table(parts, _PARTS),
        "padded planning": planning,
        "padded errors": f"{figures['draws']} draws (standard errors of imbalances are at most {errors:.1%})",
    }


_IMBALANCES = {"as_loaded", "padded", "limited", "cut_as_loaded", "whole", "parts"}
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
_PARTS = {
    "lengths": "{lengths}",
    "ranks × micro-batches": "{ranks} × {parts_per_rank}",
    "as loaded": "{as_loaded:.2f}",
    "cut": "{cut_as_loaded:.2f}",
    "whole ranks": "{whole:.2f}",
    "runs": "{parts:.2f}",
}


def tabulate_ranks(records: list[Record], columns: dict[str, str]) -> str:
    """Returns a table with a row for each kind of lengths. A cell lists the figures of `RANKS`."""
    cells: list[dict[str, Any]] = [
        {"lengths": record["lengths"], "title": title, "text": cell.format_map(record)}
        for record in records
        for title, cell in columns.items()
    ]
    return pivot(cells, {"lengths": "{lengths}"}, "{title}", "{text}")


def _largest_error(record: Record) -> float:
    """Returns the largest standard error of an imbalance ÷ the imbalance."""
    return max(error / record[name] for name, error in record["errors"].items() if name in _IMBALANCES)
