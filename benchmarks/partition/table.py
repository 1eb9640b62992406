"""The figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.markdown import markdown_table
from benchmarks.partition.lengths import LOGNORMAL, ML_100K, ML_100K_NEWEST, YAMBDA
from commons.distributed import ShufflerSettings

Record = dict[str, Any]

SIZES = (8, 64, 1024)
SIZES_OF_MOVEMENT = (8, 64, 256)
SIZES_OF_TIME = (8, 64, 256, 1024)


def all_tables(figures: Record) -> dict[str, str]:
    """By name; lines of Markdown."""
    placements = figures["placements"]
    return {
        "balance": _balance(placements),
        "gap": _gap(placements),
        "movement": _movement(placements),
        "time": _time(placements),
        "tokens": _tokens(placements),
        "pieces": _pieces(figures["pieces"]),
        "groups": _groups(figures["groups"]),
        "groups by tolerance": _groups_by_tolerance(figures["groups"]),
        "windows": _windows(figures["windows"]),
        "threads": _threads(figures["threads"]),
        "machine": _machine(figures),
    }


# By how the README calls them, lengths and hidden size.
CASES_OF_README = {
    "MovieLens 100K, uncapped": (ML_100K, 128),
    "MovieLens 100K, newest 200": (ML_100K_NEWEST, 128),
    "lognormal, d = 1024": (LOGNORMAL, 1024),
    "lognormal, d = 128: one giant exceeds a rank's share": (LOGNORMAL, 128),
    "lognormal, as Yambda-5B's, d = 1024": (YAMBDA, 1024),
}


def tables_of_readme(figures: Record) -> dict[str, str]:
    """Returns Markdown by table: imbalance at 8 / 64 ranks, as loaded and balanced, of what was measured."""
    imbalance = {
        (record["lengths"], record["hidden_size"], record["ranks"], record["placement"]): record["imbalance"]
        for record in figures["placements"]
    }
    placements = {
        "as loaded": "as loaded",
        "Karmarkar–Karp": "karmarkar_karp",
        "balanced (default)": ShufflerSettings().partitioner,
    }
    rows = [
        [
            title,
            *(
                " / ".join(f"{imbalance[*case, ranks, placement]:.2f}" for ranks in (8, 64))
                for placement in placements.values()
            ),
        ]
        for title, case in CASES_OF_README.items()
        if (*case, 8, "as loaded") in imbalance
    ]
    return {"gains": markdown_table(["histories", *placements], rows)}


def _balance(placements: list[Record]) -> str:
    def bound_of(placement: str) -> Callable[[dict[str, Record]], str]:
        return lambda of_case: f"{of_case[placement]['lower_bound']:.3f}"

    return _by_case(
        placements,
        SIZES,
        {
            "as loaded": _value("as loaded", "imbalance", 3),
            "Karmarkar–Karp": _value("karmarkar_karp", "imbalance", 3),
            "refined": _value("refined", "imbalance", 3),
            "rebalance": _value("rebalance", "imbalance", 3),
            "bound": bound_of("refined"),
            "refined, unequal rows": _value("refined, unequal rows", "imbalance", 3),
            "its bound": bound_of("refined, unequal rows"),
        },
    )


def _gap(placements: list[Record]) -> str:
    names = {
        "Karmarkar–Karp": "karmarkar_karp",
        "longest first": "longest_processing_time",
        "refined": "refined",
        "rebalance": "rebalance",
        "Karmarkar–Karp, unequal rows": "karmarkar_karp, unequal rows",
        "refined, unequal rows": "refined, unequal rows",
        "rebalance, unequal rows": "rebalance, unequal rows",
    }

    def cell(records: list[Record], placement: str) -> str:
        mean = _largest(records, placement, "percent_above_bound")
        return f"{mean:.2f} ({_largest(records, placement, 'largest_percent_above_bound'):.2f})"

    rows = [
        [*case, *(cell(records, name) for name in names.values())]
        for case, records in _grouped(placements).items()
    ]
    return markdown_table(["lengths", "d", *names], rows)


def _movement(placements: list[Record]) -> str:
    samples, of_bytes, across = (
        "percent_of_samples_moved",
        "percent_of_bytes_moved",
        "percent_of_bytes_across_nodes",
    )
    return _by_case(
        placements,
        SIZES_OF_MOVEMENT,
        {
            "refined: samples": _value("refined", samples, 0),
            "rebalance: samples": _value("rebalance", samples, 1),
            "rebalance: bytes": _value("rebalance", of_bytes, 1),
            "across nodes": _value("rebalance", across, 1),
            "across nodes, if told of them": _value("rebalance, nodes of 8", across, 1),
        },
    )


def _tokens(placements: list[Record]) -> str:
    names = {
        "as loaded": "as loaded",
        "Karmarkar–Karp": "karmarkar_karp",
        "refined": "refined",
        "rebalance": "rebalance",
        "refined, unequal rows": "refined, unequal rows",
    }
    columns = {title: _value(name, "largest_tokens", 2) for title, name in names.items()}
    return _by_case(placements, SIZES, columns)


def _time(placements: list[Record]) -> str:
    names = {
        "Karmarkar–Karp": "karmarkar_karp",
        "longest first": "longest_processing_time",
        "refined": "refined",
        "rebalance": "rebalance",
        "rebalance, nodes of 8": "rebalance, nodes of 8",
    }

    def cell(ranks: int, placement: str) -> str:
        times = [r["ms"] for r in placements if (r["ranks"], r["placement"]) == (ranks, placement)]
        if not times:
            return "–"
        return f"{max(ms['median'] for ms in times):.3f} ({max(ms['p99'] for ms in times):.3f})"

    rows = [[str(ranks), *(cell(ranks, name) for name in names.values())] for ranks in SIZES_OF_TIME]
    return markdown_table(["ranks", *names], rows)


def _pieces(pieces: list[Record]) -> str:
    """Leaves out cases in which nothing is cut."""
    cases: dict[tuple[str, ...], list[Record]] = {}
    for record in pieces:
        if record["ranks"] in SIZES:
            case = record["lengths"], str(record["hidden_size"]), str(record["rows_per_rank"])
            cases.setdefault(case, []).append(record)
    columns: dict[str, tuple[str, int]] = {
        "whole": ("imbalance_of_whole_samples", 2),
        "pieces": ("imbalance", 3),
        "worst draw": ("largest_imbalance", 3),
        "samples cut": ("samples_cut", 1),
        "their pieces": ("pieces", 1),
        "MB fetched": ("mb_fetched", 1),
        "ms, whole": ("ms_of_whole_samples", 2),
        "ms, pieces": ("ms", 2),
    }

    def cell(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    rows = [
        [
            *case,
            *(" / ".join(cell(each[key], digits) for each in records) for key, digits in columns.values()),
        ]
        for case, records in cases.items()
        if any(each["pieces"] for each in records)
    ]
    return markdown_table(["lengths", "d", "rows", *columns], rows)


DEFAULT_TOLERANCES = (None, 0.01)


def _groups(groups: list[Record]) -> str:
    """Placements at their default tolerances."""
    rows = []
    for record in groups:
        if record["tolerance"] in DEFAULT_TOLERANCES:
            rows.append(
                [
                    record["lengths"],
                    f"{record['samples_per_user']}",
                    f"{record['ranks']}",
                    record["placement"],
                    f"{record['unique_ids']:.2f}",
                    f"{record['unique_ids_of_most']:.2f}",
                    f"{record['percent_above_bound']:.2f}%",
                    f"{record['percent_of_bytes_moved']:.0f}%",
                    f"{record['ms']:.2f}",
                ]
            )
    titles = ["lengths", "samples per user", "ranks", "placement", "unique ids", "on the rank with most"]
    return markdown_table([*titles, "above the bound", "bytes moved", "ms"], rows)


def _groups_by_tolerance(groups: list[Record]) -> str:
    """Mean unique ids with many samples per user."""
    cases: dict[tuple[str, ...], dict[float, str]] = {}
    per_user = max(record["samples_per_user"] for record in groups)
    for record in groups:
        if record["tolerance"] is not None and record["samples_per_user"] == per_user:
            case = record["lengths"], f"{record['ranks']}", record["placement"]
            cases.setdefault(case, {})[record["tolerance"]] = f"{record['unique_ids']:.2f}"
    tolerances = list(dict.fromkeys(each for of_case in cases.values() for each in of_case))
    rows = [[*case, *(of_case[each] for each in tolerances)] for case, of_case in cases.items()]
    return markdown_table(["lengths", "ranks", "placement", *(f"{each:.1%}" for each in tolerances)], rows)


def _windows(windows: list[Record]) -> str:
    limits = list(dict.fromkeys(record["max_step_ratio"] for record in windows))
    cases: dict[tuple[int, int], dict[float | None, Record]] = {}
    for record in windows:
        cases.setdefault((record["ranks"], record["num_steps"]), {})[record["max_step_ratio"]] = record

    def cell(record: Record | None) -> str:
        if record is None:
            return "–"
        return f"{record['largest_loads_over_ideal']:.3f} ({record['largest_step_ratio']['mean']:.2f})"

    rows = [
        [
            f"{ranks}",
            f"{steps}",
            *(cell(records.get(limit)) for limit in limits),
            f"{max(record['ms_median'] for record in records.values()):.2f}",
        ]
        for (ranks, steps), records in cases.items()
    ]
    titles = ["no limit" if limit is None else f"limit {limit}" for limit in limits]
    return markdown_table(["ranks", "steps", *titles, "ms"], rows)


def _threads(threads: list[Record]) -> str:
    rows = []
    for record in threads:
        speed = record["loop_speed_relative_to_alone"]
        rows.append(
            [
                record["placement"],
                f"{record['ranks']}",
                f"{speed['median']:.0%} ({speed['min']:.0%} to {speed['max']:.0%})",
                f"{record['ms_per_call_alone']:.2f}",
                f"{record['ms_per_call_beside_the_loop']:.2f}",
            ]
        )
    return markdown_table(
        ["partitioner", "ranks", "speed of the loop", "ms alone", "ms beside the loop"], rows
    )


def _machine(figures: Record) -> str:
    machine = figures["machine"]
    return (
        f"Times: one of {machine['cores']} cores ({machine['cpu']}), Python {machine['python']}, "
        f"numpy {machine['numpy']}, numba {machine['numba']}. Everything else: {figures['draws']} draws each."
    )


def _value(placement: str, key: str, digits: int) -> Callable[[dict[str, Record]], str]:
    """Functions from the records of one case to a table's value, by placement."""
    return lambda of_case: f"{of_case[placement][key]:.{digits}f}" if placement in of_case else "–"


def _by_case(
    placements: list[Record], sizes: Iterable[int], columns: dict[str, Callable[[dict[str, Record]], str]]
) -> str:
    """A row for each lengths and hidden size; in each cell the values at these numbers of ranks."""
    rows = []
    for case, records in _grouped(placements).items():
        by_ranks: dict[int, dict[str, Record]] = {}
        for record in records:
            by_ranks.setdefault(record["ranks"], {})[record["placement"]] = record
        cells = [" / ".join(value(by_ranks[ranks]) for ranks in sizes) for value in columns.values()]
        rows.append([*case, *cells])
    return markdown_table(["lengths", "d", *columns], rows)


def _grouped(placements: list[Record]) -> dict[tuple[str, str], list[Record]]:
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in placements:
        cases.setdefault((record["lengths"], str(record["hidden_size"])), []).append(record)
    return cases


def _largest(records: list[Record], placement: str, key: str) -> float:
    return max(record[key] for record in records if record["placement"] == placement)
