"""Writes Markdown tables into pages, and the figures that they show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def markdown_table(titles: list[str], rows: list[list[str]]) -> str:
    """Returns a table padded to read well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [titles, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def write_tables(page: Path, benchmark: str, tables: dict[str, str]) -> None:
    """Writes each table between its markers, `<!-- BENCHMARK NAME: begin -->` and `… end -->`.

    Raises:
        ValueError: markers are missing.
    """
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {benchmark} {name}: begin -->\n", f"<!-- {benchmark} {name}: end -->\n"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{page.name} has no place for the table {name!r}: {begin!r} and {end!r}")
        text = f"{before}{begin}{table}\n{end}{after}"
    page.write_text(text)


def publish(
    figures: dict[str, Any], tables: dict[str, str], result: Path, page: Path, benchmark: str
) -> None:
    """Prints the tables, saves the figures as JSON, and writes the tables as `write_tables` does.

    Raises:
        ValueError: markers are missing.
    """
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")
    result.write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(page, benchmark, tables)
