"""How well the partition algorithms balance, what they move, and how long they take.

Computed loads of random histories, and of MovieLens 100K's where its folder is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numba
import numpy as np

from benchmarks.harness import RESULTS, Record, machine
from benchmarks.markdown import markdown_table
from benchmarks.partition.groups import groups_table, measure_groups, tolerances_table
from benchmarks.partition.interpreter import measure_interpreter, threads_table
from benchmarks.partition.lengths import LOGNORMAL, ML_100K, ML_100K_NEWEST, YAMBDA, all_lengths
from benchmarks.partition.measure import measure_placements
from benchmarks.partition.picture import draw
from benchmarks.partition.pieces import measure_pieces, pieces_table
from benchmarks.partition.placements import ROWS_PER_RANK
from benchmarks.partition.windows import measure_windows, windows_table
from commons.distributed import ShufflerSettings

DRAWS = 30
SIZES = (8, 64, 1024)
SIZES_OF_MOVEMENT = (8, 64, 256)
SIZES_OF_TIME = (8, 64, 256, 1024)
# By how the README calls them, lengths and hidden size.
CASES_OF_README = {
    "MovieLens 100K, uncapped": (ML_100K, 128),
    "MovieLens 100K, newest 200": (ML_100K_NEWEST, 128),
    "lognormal, d = 1024": (LOGNORMAL, 1024),
    "lognormal, d = 128: one giant exceeds a rank's share": (LOGNORMAL, 128),
    "lognormal, as Yambda-5B's, d = 1024": (YAMBDA, 1024),
}
# Placements by title.
KARMARKAR_KARP = {"Karmarkar–Karp": "karmarkar_karp"}
EQUAL_ROWS = {**KARMARKAR_KARP, "longest first": "longest_processing_time"} | {
    name: name for name in ("refined", "rebalance")
}
PLACED = {"as loaded": "as loaded", **KARMARKAR_KARP, "refined": "refined", "rebalance": "rebalance"}


def measure(movielens: Path | None = None) -> Record:
    """Returns records of placements, pieces, groups, windows and threads; draws the picture if complete."""
    lengths = all_lengths(movielens)
    placements = measure_placements(lengths, DRAWS)
    if movielens is not None:
        draw(placements, RESULTS / "partition.png")
    return {
        "rows_per_rank": ROWS_PER_RANK,
        "draws": DRAWS,
        "machine": {**machine(), "numpy": np.__version__, "numba": numba.__version__},
        "placements": placements,
        "pieces": measure_pieces(lengths, DRAWS),
        "groups": measure_groups(DRAWS),
        "windows": measure_windows(DRAWS),
        "threads": measure_interpreter(),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    placements = figures["placements"]
    on = (
        "Times: one of {cores} cores ({cpu}), Python {python}, numpy {numpy}, numba {numba}. "
        "Everything else: {draws} draws each."
    )
    balance = {title: (name, "{imbalance:.3f}") for title, name in PLACED.items()} | {
        "bound": ("refined", "{lower_bound:.3f}"),
        "refined, unequal rows": ("refined, unequal rows", "{imbalance:.3f}"),
        "its bound": ("refined, unequal rows", "{lower_bound:.3f}"),
    }
    across = "{percent_of_bytes_across_nodes:.1f}"
    movement = {
        "refined: samples": ("refined", "{percent_of_samples_moved:.0f}"),
        "rebalance: samples": ("rebalance", "{percent_of_samples_moved:.1f}"),
        "rebalance: bytes": ("rebalance", "{percent_of_bytes_moved:.1f}"),
        "across nodes": ("rebalance", across),
        "across nodes, if told of them": ("rebalance, nodes of 8", across),
    }
    of_tokens = PLACED | {"refined, unequal rows": "refined, unequal rows"}
    tokens = {title: (name, "{largest_tokens:.2f}") for title, name in of_tokens.items()}
    return {
        "partition balance": _by_case(placements, SIZES, balance),
        "partition gap": _gap(placements),
        "partition movement": _by_case(placements, SIZES_OF_MOVEMENT, movement),
        "partition time": _time(placements),
        "partition tokens": _by_case(placements, SIZES, tokens),
        "partition pieces": pieces_table(figures["pieces"], SIZES),
        "partition groups": groups_table(figures["groups"]),
        "partition groups by tolerance": tolerances_table(figures["groups"]),
        "partition windows": windows_table(figures["windows"]),
        "partition threads": threads_table(figures["threads"]),
        "partition machine": on.format(draws=figures["draws"], **figures["machine"]),
        "readme gains": _gains(placements),
    }


def _by_case(placements: list[Record], sizes: Sequence[int], columns: Mapping[str, tuple[str, str]]) -> str:
    """A row for each lengths and hidden size; a cell has a placement's figure at these numbers of ranks."""
    rows = []
    for case, records in _cases(placements).items():
        known = {(record["ranks"], record["placement"]): record for record in records}
        cells = [
            " / ".join(
                cell.format(**known[ranks, name]) if (ranks, name) in known else "–" for ranks in sizes
            )
            for name, cell in columns.values()
        ]
        rows.append([*case, *cells])
    return markdown_table(["lengths", "d", *columns], rows)


def _cases(placements: list[Record]) -> dict[tuple[str, str], list[Record]]:
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in placements:
        cases.setdefault((record["lengths"], str(record["hidden_size"])), []).append(record)
    return cases


def _gap(placements: list[Record]) -> str:
    """The largest distance from the bound at any number of ranks, mean and worst draw."""
    unequal = {
        f"{title}, unequal rows": f"{EQUAL_ROWS[title]}, unequal rows"
        for title in ("Karmarkar–Karp", "refined", "rebalance")
    }
    names = EQUAL_ROWS | unequal

    def cell(records: list[Record], placement: str) -> str:
        of_placement = [record for record in records if record["placement"] == placement]
        mean, worst = (
            max(record[key] for record in of_placement)
            for key in ("percent_above_bound", "largest_percent_above_bound")
        )
        return f"{mean:.2f} ({worst:.2f})"

    rows = [
        [*case, *(cell(records, name) for name in names.values())]
        for case, records in _cases(placements).items()
    ]
    return markdown_table(["lengths", "d", *names], rows)


def _time(placements: list[Record]) -> str:
    """The slowest case at each number of ranks."""
    names = EQUAL_ROWS | {"rebalance, nodes of 8": "rebalance, nodes of 8"}

    def cell(ranks: int, placement: str) -> str:
        times = [r["ms"] for r in placements if (r["ranks"], r["placement"]) == (ranks, placement)]
        if not times:
            return "–"
        return f"{max(ms['median'] for ms in times):.3f} ({max(ms['p99'] for ms in times):.3f})"

    rows = [[str(ranks), *(cell(ranks, name) for name in names.values())] for ranks in SIZES_OF_TIME]
    return markdown_table(["ranks", *names], rows)


def _gains(placements: list[Record]) -> str:
    """Imbalance at 8 / 64 ranks, as loaded and balanced, of what was measured."""
    imbalance = {
        (record["lengths"], record["hidden_size"], record["ranks"], record["placement"]): record["imbalance"]
        for record in placements
    }
    names = {"as loaded": "as loaded", **KARMARKAR_KARP, "balanced (default)": ShufflerSettings().partitioner}
    rows = [
        [
            title,
            *(
                " / ".join(f"{imbalance[*case, ranks, name]:.2f}" for ranks in (8, 64))
                for name in names.values()
            ),
        ]
        for title, case in CASES_OF_README.items()
        if (*case, 8, "as loaded") in imbalance
    ]
    return markdown_table(["histories", *names], rows)
