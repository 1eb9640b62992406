"""The figures as Markdown tables."""

from __future__ import annotations

from typing import Any

from benchmarks.lookups.arms import AS_LOADED, REFERENCE
from benchmarks.markdown import markdown_table

Record = dict[str, Any]


def all_tables(figures: Record) -> dict[str, str]:
    """Returns lines of Markdown by table."""
    return {
        "streams": _streams(figures["streams"]),
        "arms": _arms(figures["streams"]),
        "machine": _machine(figures),
    }


def _streams(records: list[Record]) -> str:
    rows = []
    for record in records:
        as_loaded = record["arms"][AS_LOADED]
        lookups, step = record["lookups_ms"]["median"], as_loaded["step_ms"]["median"]
        rows.append(
            [
                record["stream"],
                record["lengths"],
                f"{record['ids']:,.0f}",
                f"{as_loaded['unique_ids'] / record['ids']:.2f}",
                f"{as_loaded['embedding_megabytes']:.1f}",
                f"{lookups:.0f} ({lookups / step:.0%})",
            ]
        )
    return markdown_table(
        ["stream", "lengths", "ids per rank", "unique", "embedding MB", "lookups alone, ms"], rows
    )


def _arms(records: list[Record]) -> str:
    rows = []
    for record in records:
        as_loaded = record["arms"][AS_LOADED]
        for name, arm in record["arms"].items():
            mean, most = (arm[key] / as_loaded[key] for key in ("unique_ids", "unique_ids_of_most"))
            rows.append(
                [
                    f"{record['stream']}, {record['lengths'].partition(' ')[0].partition('(')[0]}",
                    name,
                    "{median:.0f} ({min:.0f} to {max:.0f})".format(**arm["step_ms"]),
                    "{median:.2f} ({lower:.2f} to {upper:.2f})".format(**arm["ratio_to_reference"]),
                    f"{arm['imbalance']:.3f}",
                    f"{mean:.2f} / {most:.2f}",
                    f"{arm['embedding_megabytes']:.1f}",
                    f"{arm['sample_kilobytes_sent']:.0f}",
                    f"{arm['planning_ms']['median']:.1f}",
                ]
            )
    return markdown_table(
        [
            "stream",
            "partitioner",
            "step, ms",
            f"÷ {REFERENCE}",
            "imbalance",
            "unique ids, mean / most",
            "embedding MB",
            "sample kB",
            "planning, ms",
        ],
        rows,
    )


def _machine(figures: Record) -> str:
    machine = figures["machine"]
    return (
        f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, gloo, one thread per rank; "
        f"medians and extremes of {figures['steps']} steps."
    )
