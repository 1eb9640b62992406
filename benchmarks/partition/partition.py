"""Measures how well the partition algorithms balance, how much they move, and how long they take.

The loads are computed for random histories, and for MovieLens 100K's if its folder is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import Record, average, find_percentiles, show_progress, time_in_turns
from benchmarks.markdown import markdown_table
from benchmarks.partition.groups import measure_groups, tabulate_groups
from benchmarks.partition.pieces import measure_pieces, tabulate_pieces
from benchmarks.partition.placements import (
    AS_LOADED,
    KUAIRAND,
    LOGNORMAL,
    ML_100K,
    ML_100K_NEWEST,
    PLACEMENTS,
    RANKS_PER_NODE,
    REBALANCE_NODES,
    TAOBAO,
    UNEQUAL_ROWS,
    YAMBDA,
    ZIPF,
    GlobalBatch,
    Lengths,
    draw_batches,
    list_lengths,
)
from commons.partition import imbalance, lower_bound
from commons.partition.problem import number_of_part

# (lengths, width of the layer)
CASES = (
    *((ML_100K, 128), (ML_100K, 1024), (ML_100K_NEWEST, 128), (LOGNORMAL, 128), (LOGNORMAL, 1024)),
    *((ZIPF, 128), (YAMBDA, 1024), (KUAIRAND, 1024), (TAOBAO, 128), (TAOBAO, 1024)),
)
DRAWS, PASSES = 30, 2
CALLS = {8: 240, 64: 240, 256: 90, 1024: 30}  # by number of ranks
SHOWN_RANKS = (8, 64, 1024)
# Names of placements by title.
KARMARKAR_KARP = {"Karmarkar–Karp": "karmarkar_karp"}
TIMED = KARMARKAR_KARP | {"longest first": "longest_processing_time"}
TIMED |= {name: name for name in ("refined", "rebalance", REBALANCE_NODES)}

# Records by lengths, hidden size, ranks, and placement.
Known = Mapping[tuple[str, int, int, str], Record]


def measure(movielens: Path | None = None) -> Record:
    """Returns records of placements, pieces, and groups."""
    lengths = list_lengths(movielens)
    return {
        "draws": DRAWS,
        "placements": _measure_placements(lengths),
        "pieces": measure_pieces(lengths, DRAWS),
        "groups": measure_groups(DRAWS),
    }


def _measure_placements(lengths: dict[str, Lengths]) -> list[Record]:
    cases = [(*case, ranks) for case in CASES if case[0] in lengths for ranks in CALLS]
    figures: dict[tuple, Record] = {}
    times: dict[tuple, list[float]] = {}
    # If the machine slows down for some seconds, it slows only one of the two passes of a case.
    for name, hidden_size, ranks in show_progress(cases * PASSES, "placements"):
        batches = draw_batches(lengths[name], hidden_size, ranks, DRAWS)
        for title, place in PLACEMENTS.items():
            if title == REBALANCE_NODES and ranks <= RANKS_PER_NODE:
                continue
            key = (name, hidden_size, ranks, title)
            if key not in figures:
                equal_rows = title != UNEQUAL_ROWS
                figures[key] = average([_assess(batch, place(batch), equal_rows) for batch in batches])
            # The batches take turns, so that no call finds its data in the cache.
            rounds = -(-CALLS[ranks] // (DRAWS * PASSES))
            taken = time_in_turns({title: place}, rounds, [(batch,) for batch in batches])[title]
            times.setdefault(key, []).extend(taken)
    names = ("lengths", "hidden_size", "ranks", "placement")
    return [
        {**dict(zip(names, key, strict=True)), **found, "ms": find_percentiles(times[key])}
        for key, found in figures.items()
    ]


def _assess(batch: GlobalBatch, partition: list[np.ndarray], equal_rows: bool) -> dict[str, float]:
    """Returns the balance, and the percentages of all samples and bytes that move."""
    rank_of = number_of_part(partition, len(batch.home))
    moved = rank_of != batch.home
    crossed = rank_of // RANKS_PER_NODE != batch.home // RANKS_PER_NODE
    return {
        "imbalance": imbalance(batch.workloads, partition),
        "lower_bound": lower_bound(batch.workloads, batch.ranks, equal_size=equal_rows),
        "percent_of_samples_moved": 100 * moved.mean(),
        "percent_of_bytes_moved": 100 * batch.sizes[moved].sum() / batch.sizes.sum(),
        "percent_of_bytes_across_nodes": 100 * batch.sizes[crossed].sum() / batch.sizes.sum(),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    names = ("lengths", "hidden_size", "ranks", "placement")
    known = {tuple(record[name] for name in names): record for record in figures["placements"]}
    on = (
        "Times: one of {cores} cores ({cpu}), Python {python}, numpy {numpy}, numba {numba}. "
        "Everything else: {draws} draws each."
    )
    balance = {
        title: (placement, "{imbalance:.3f}")
        for title, placement in ({AS_LOADED: AS_LOADED} | KARMARKAR_KARP | {"rebalance": "rebalance"}).items()
    }
    balance |= {"bound": ("refined", "{lower_bound:.3f}"), UNEQUAL_ROWS: (UNEQUAL_ROWS, "{imbalance:.3f}")}
    across = "{percent_of_bytes_across_nodes:.1f}"
    movement = {
        "samples": ("rebalance", "{percent_of_samples_moved:.1f}"),
        "bytes": ("rebalance", "{percent_of_bytes_moved:.1f}"),
        "across nodes": ("rebalance", across),
        "across nodes, if told of them": (REBALANCE_NODES, across),
    }
    return {
        "readme tail": _compare(known, (LOGNORMAL, 1024, 64), "imbalance", ".2f"),
        "readme capped": _compare(known, (ML_100K_NEWEST, 128, 64), "imbalance", ".2f"),
        "readme moved": _compare(known, (LOGNORMAL, 1024, 64), "percent_of_samples_moved", ".0f", "%"),
        "partition balance": _tabulate_cases(known, balance),
        "partition movement": _tabulate_cases(known, movement),
        "partition time": _tabulate_times(known),
        "partition pieces": tabulate_pieces(figures["pieces"], SHOWN_RANKS),
        "partition groups": tabulate_groups(figures["groups"]),
        "partition machine": on.format(draws=figures["draws"], **figures["machine"]),
    }


def _compare(known: Known, case: tuple[str, int, int], figure: str, form: str, unit: str = "") -> str:
    """Returns a phrase with a figure of Karmarkar–Karp and of the default."""
    of = {name: format(known[*case, name][figure], form) + unit for name in ("karmarkar_karp", "rebalance")}
    return f"{of['karmarkar_karp']} with Karmarkar–Karp and {of['rebalance']} with the default"


def _join(known: Known, case: tuple[str, int], ranks: Sequence[int], placement: str, cell: str) -> str:
    """Returns a placement's figure at each number of ranks, joined by " / "."""
    found = [known.get((*case, number, placement)) for number in ranks]
    return " / ".join("–" if record is None else cell.format(**record) for record in found)


def _tabulate_cases(known: Known, columns: Mapping[str, tuple[str, str]]) -> str:
    """Returns a table with a row for each lengths and width. A column has a placement and its figure."""
    measured = [case for case in CASES if (*case, SHOWN_RANKS[0], AS_LOADED) in known]
    rows = [
        [case[0], str(case[1]), *(_join(known, case, SHOWN_RANKS, *column) for column in columns.values())]
        for case in measured
    ]
    return markdown_table(["lengths", "d", *columns], rows)


def _tabulate_times(known: Known) -> str:
    """Returns a table of the slowest case at each number of ranks."""

    def cell(ranks: int, placement: str) -> str:
        found = (known.get((*case, ranks, placement)) for case in CASES)
        times = [record["ms"] for record in found if record]
        if not times:
            return "–"
        return f"{max(ms['median'] for ms in times):.3f} ({max(ms['p99'] for ms in times):.3f})"

    rows = [[str(ranks), *(cell(ranks, name) for name in TIMED.values())] for ranks in CALLS]
    return markdown_table(["ranks", *TIMED], rows)
