"""Measures how well the partition algorithms balance, and how much they move.

The loads are computed for random histories, and for MovieLens 100K's if its folder is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.harness import Record, average, measure_cases
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
DRAWS, RANKS = 30, (8, 64, 1024)
KARMARKAR_KARP = "karmarkar_karp"
NAMES = ("lengths", "hidden_size", "ranks", "placement")

# Records by the values of `NAMES`.
Known = Mapping[tuple[str, int, int, str], Record]


def measure(movielens: Path | None = None) -> Record:
    """Returns records of placements, pieces, and groups."""
    lengths = list_lengths(movielens)

    def place(lengths: str, hidden_size: int, ranks: int, placement: str) -> Record:
        batches = draw_batches(known[lengths], hidden_size, ranks, DRAWS)
        equal_rows = placement != UNEQUAL_ROWS
        return average([_assess(batch, PLACEMENTS[placement](batch), equal_rows) for batch in batches])

    known = lengths
    cases = [
        dict(zip(NAMES, (*case, ranks, placement), strict=True))
        for case in CASES
        for ranks in RANKS
        for placement in PLACEMENTS
        if case[0] in lengths and (ranks > RANKS_PER_NODE or placement != REBALANCE_NODES)
    ]
    return {
        "draws": DRAWS,
        "placements": measure_cases(cases, place, "placements"),
        "pieces": measure_pieces(lengths, DRAWS),
        "groups": measure_groups(DRAWS),
    }


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
    known = {tuple(record[name] for name in NAMES): record for record in figures["placements"]}
    on = (
        "Times: one of {cores} cores ({cpu}), Python {python}, numpy {numpy}, numba {numba}. "
        "Everything else: {draws} draws each."
    )
    balance = {
        AS_LOADED: (AS_LOADED, "{imbalance:.3f}"),
        "Karmarkar–Karp": (KARMARKAR_KARP, "{imbalance:.3f}"),
        "rebalance": ("rebalance", "{imbalance:.3f}"),
        "bound": ("refined", "{lower_bound:.3f}"),
        UNEQUAL_ROWS: (UNEQUAL_ROWS, "{imbalance:.3f}"),
    }
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
        "partition balance": _tabulate(known, balance),
        "partition movement": _tabulate(known, movement),
        "partition pieces": tabulate_pieces(figures["pieces"]),
        "partition groups": tabulate_groups(figures["groups"]),
        "partition machine": on.format(draws=figures["draws"], **figures["machine"]),
    }


def _compare(known: Known, case: tuple[str, int, int], figure: str, form: str, unit: str = "") -> str:
    """Returns a phrase with a figure of Karmarkar–Karp and of the default."""
    of = {name: format(known[*case, name][figure], form) + unit for name in (KARMARKAR_KARP, "rebalance")}
    return f"{of[KARMARKAR_KARP]} with Karmarkar–Karp and {of['rebalance']} with the default"


def _tabulate(known: Known, columns: Mapping[str, tuple[str, str]]) -> str:
    """Returns a table with a row for each lengths and width. A column has a placement and its figure."""
    rows = []
    for case in CASES:
        if (*case, RANKS[0], AS_LOADED) not in known:
            continue
        row = [case[0], str(case[1])]
        for placement, cell in columns.values():
            found = [known.get((*case, ranks, placement)) for ranks in RANKS]
            row.append(" / ".join("–" if record is None else cell.format(**record) for record in found))
        rows.append(row)
    return markdown_table(["lengths", "d", *columns], rows)
