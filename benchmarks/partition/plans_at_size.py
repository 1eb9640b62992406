"""Measures the cost of plans and of their moves at 8 to 4,096 ranks.

Times are CPU times of one process. Bytes, messages, and ranks met are counted. Wire times follow from bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Record, average, find_percentiles, list_cases, measure_cases, time_in_turns
from benchmarks.markdown import make_table, pivot
from benchmarks.partition.pieces import load_histories
from benchmarks.partition.placements import (
    LOGNORMAL,
    RANKS_PER_NODE,
    ROWS_PER_RANK,
    UNIFORM,
    YAMBDA,
    list_lengths,
)
from commons.distributed import ShufflerSettings
from commons.distributed.placement import partition, place, token_tolerance, warm_up
from commons.distributed.plan import Format, RowTable, ShufflePlan

LENGTHS, HIDDEN_SIZE, RANKS = (LOGNORMAL, YAMBDA, UNIFORM), 256, (8, 64, 256, 1024, 4096)
# Number of global batches, and of calls for each, by ranks. With few calls, p99 is nearly the slowest call.
DRAWS = {8: 100, 64: 100, 256: 100, 1024: 50, 4096: 30}
CALLS = {8: 5, 64: 5, 256: 3, 1024: 4, 4096: 2}

MOVED_LENGTHS, MOVED_RANKS, STEPS = (LOGNORMAL, YAMBDA), (64, 1024), 100
# Peak bytes per second that a GPU sends: 400 Gb/s InfiniBand per GPU across nodes, and an H100's NVLink
# within a node, whose 900 GB/s are the sum of both directions.
ACROSS_NODES, WITHIN_NODE = 50e9, 450e9
DENSE_BYTES = 100_000  # added to a sample by an image or its embedding, say

LONGEST_FIRST, DEFAULT, DEFAULT_NODES = "longest first", "default", f"default, nodes of {RANKS_PER_NODE}"
# Settings, and whether they are told of nodes, by title.
PARTITIONERS = {
    LONGEST_FIRST: (ShufflerSettings("longest_processing_time"), False),
    "Karmarkar–Karp": (ShufflerSettings("karmarkar_karp"), False),
    "refined": (ShufflerSettings("refined"), False),
    DEFAULT: (ShufflerSettings(), False),
    DEFAULT_NODES: (ShufflerSettings(), True),
}


def call_partitioner(title: str, rows: RowTable) -> np.ndarray:
    """Returns the rank of each row, int64 `[rows]`, from a partitioner as the shuffler calls it."""
    settings, has_nodes = PARTITIONERS[title]
    rows = replace(rows, ranks_per_node=RANKS_PER_NODE if has_nodes else None)
    tolerance = token_tolerance(rows, settings)
    return partition(
        rows, settings, tokens=None if tolerance is None else rows.tokens, token_tolerance=tolerance
    )


def draw_steps(lengths: str, ranks: int, draws: int) -> list[GatheredStep]:
    """Returns random steps."""
    rng, draw = np.random.default_rng([0, ranks]), list_lengths(None)[lengths]
    return [GatheredStep.of(draw(rng, ROWS_PER_RANK * ranks), ranks) for _ in range(draws)]


@dataclass(frozen=True)
class GatheredStep:
    """The numbers of a step that every rank holds after the planning gather.

    Attributes:
        messages: messages of all ranks, as the gather returns them.
        row_format: format of the messages.
        rows: the same rows, as a partitioner's input.
    """

    messages: np.ndarray
    row_format: Format
    rows: RowTable

    @staticmethod
    def of(lengths: np.ndarray, ranks: int) -> GatheredStep:
        """Returns gathered histories of these lengths."""
        rows, row_format = load_histories(lengths, HIDDEN_SIZE, ranks)
        messages = np.zeros(ranks, dtype=row_format.message(np.dtype([]), ROWS_PER_RANK))
        messages["num_rows"] = messages["num_real"] = ROWS_PER_RANK
        gathered = messages["rows"]
        gathered["work"] = rows.work.reshape(ranks, ROWS_PER_RANK, -1)
        for name in ("tokens", "loss_tokens"):
            gathered[name] = getattr(rows, name).reshape(ranks, ROWS_PER_RANK)
        gathered["key_lengths"] = rows.key_lengths.reshape(ranks, ROWS_PER_RANK, -1)
        return GatheredStep(messages, row_format, rows)

    def decode(self) -> RowTable:
        """Returns the rows of all ranks, as the gather does."""
        return self.row_format.table(self.messages)

    def plan(self, settings: ShufflerSettings) -> ShufflePlan:
        """Returns the plan of a job on nodes of 8 ranks."""
        return place(replace(self.decode(), ranks_per_node=RANKS_PER_NODE), settings)


# Timed parts of a step: the default plan, its two largest parts, and the plan with `refined`.
PARTS: dict[str, Callable[[GatheredStep], object]] = {
    "plan": lambda step: step.plan(ShufflerSettings()),
    "decoding": GatheredStep.decode,
    "partitioner": lambda step: call_partitioner(DEFAULT_NODES, step.rows),
    "refined": lambda step: step.plan(ShufflerSettings("refined")),
}


def measure() -> Record:
    """Returns records of partitioners, whole plans, and moves."""
    sizes = list_cases(lengths=LENGTHS, ranks=RANKS)
    moved = list_cases(lengths=MOVED_LENGTHS, ranks=MOVED_RANKS)
    for partitioner in ("rebalance", "refined"):  # also compiles functions that a draw may skip
        warm_up(ShufflerSettings(partitioner))
    return {
        "partitioners": measure_cases(sizes, _time_partitioners, "partitioners"),
        "plans": measure_cases(sizes, _time_plans, "plans"),
        "moves": measure_cases(
            [case | {"placement": name} for case in moved for name in PARTITIONERS], _move, "moves"
        ),
    }


def _time_partitioners(lengths: str, ranks: int) -> Record:
    calls = {title: partial(call_partitioner, title) for title in PARTITIONERS}
    if ranks <= RANKS_PER_NODE:
        del calls[DEFAULT_NODES]
    steps = draw_steps(lengths, ranks, DRAWS[ranks])
    return {"ms": _time(calls, [step.rows for step in steps], ranks)}


def _time_plans(lengths: str, ranks: int) -> Record:
    return {"ms": _time(PARTS, draw_steps(lengths, ranks, DRAWS[ranks]), ranks)}


def _time(calls: Mapping[str, Callable[..., object]], inputs: Sequence[Any], ranks: int) -> Record:
    times = time_in_turns(calls, CALLS[ranks], [(each,) for each in inputs])
    return {name: find_percentiles(taken) for name, taken in times.items()}


def _move(lengths: str, ranks: int, placement: str) -> Record:
    """Returns a step's mean traffic, and the number of ranks that each rank has met after all steps."""
    met, figures = np.zeros((ranks, ranks), dtype=bool), []
    for rows in (step.rows for step in draw_steps(lengths, ranks, STEPS)):
        rank_of = call_partitioner(placement, rows)
        moved = rank_of != rows.home
        sender, receiver = rows.home[moved], rank_of[moved]
        figures.append(count_sent(sender, receiver, rows.sample_bytes[moved], ranks))
        figures[-1]["percent_moved"] = 100 * float(moved.mean())
        met[sender, receiver] = True
    return average(figures, 3) | {"ranks_met": round(float((met | met.T).sum(1).mean()), 2)}


def count_sent(sender: np.ndarray, receiver: np.ndarray, sizes: np.ndarray, ranks: int) -> Record:
    """Returns the kilobytes that the busiest rank sends, their wire time, and the numbers of messages.

    The busiest rank's bytes take longest. A message holds all samples that one rank sends to another.

    Args:
        sender, receiver: home and destination of each moved sample, int64 `[moved samples]`.
        sizes: bytes of each moved sample, int64 `[moved samples]`.
        ranks: number of ranks.
    """
    across = sender // RANKS_PER_NODE != receiver // RANKS_PER_NODE

    def per_rank(which: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        return np.bincount(sender[which], amounts[which], ranks)

    within_node, to_others = per_rank(~across, sizes), per_rank(across, sizes)
    us, dense = _time_wire(within_node, to_others), sizes + DENSE_BYTES
    busiest = us.argmax()
    first = np.unique(sender * ranks + receiver, return_index=True)[1]
    messages, ones = np.zeros(len(sender), dtype=bool), np.ones(len(sender))
    messages[first] = True
    sent = per_rank(messages, ones)
    return {
        "kb_within_node": within_node[busiest] / 1e3,
        "kb_to_others": to_others[busiest] / 1e3,
        "us": us[busiest],
        "dense_us": _time_wire(per_rank(~across, dense), per_rank(across, dense)).max(),
        "mean_messages": sent.mean(),
        "messages": sent.max(),
        "mean_messages_across": per_rank(messages & across, ones).mean(),
        "messages_across": per_rank(messages & across, ones).max(),
    }


def _time_wire(within_node: Any, to_others: Any) -> Any:
    """Returns the microseconds that bytes take. Both links of a GPU send at the same time."""
    return 1e6 * np.maximum(within_node / WITHIN_NODE, to_others / ACROSS_NODES)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    on = "one of {cores} cores ({cpu}), Python {python}, numpy {numpy}, numba {numba}"
    size = {"lengths": "{lengths}", "ranks": "{ranks:,}"}
    timed = [
        {**record, **ms, "placement": title, "ratio": ms["median"] / record["ms"][LONGEST_FIRST]["median"]}
        for record in figures["partitioners"]
        for title, ms in record["ms"].items()
    ]
    return {
        "plans machine": on.format(**figures["machine"]),
        "plans partitioner": pivot(timed, size, "{placement}", "{median:.2f} ({p99:.2f}), {ratio:.1f}×"),
        "plans whole": make_table(map(_find_shares, figures["plans"]), size | _WHOLE),
        "plans moves": make_table(figures["moves"], size | _MOVES),
    }


_WHOLE = {
    "plan, ms": "{ms[plan][median]:.2f} ({ms[plan][p99]:.2f})",
    "of it the partitioner": "{partitioner:.0%}",
    "decoding": "{decoding:.0%}",
    "by refined, ms": "{ms[refined][median]:.2f} ({ms[refined][p99]:.2f})",
}
_MOVES = {
    "placement": "{placement}",
    "samples moved": "{percent_moved:.0f}%",
    "kB in its node": "{kb_within_node:,.0f}",
    "kB to others": "{kb_to_others:,.0f}",
    "wire, µs": "{us:.0f}",
    "100 kB more each, µs": "{dense_us:.0f}",
    "messages": "{mean_messages:.1f} ({messages:.1f})",
    "to other nodes": "{mean_messages_across:.1f} ({messages_across:.1f})",
    "met": "{ranks_met:,.0f}",
}


def _find_shares(record: Record) -> Record:
    """Returns a record with its parts' shares of the plan's median time."""
    shares = {name: ms["median"] / record["ms"]["plan"]["median"] for name, ms in record["ms"].items()}
    return record | {name: shares[name] for name in ("partitioner", "decoding")}
