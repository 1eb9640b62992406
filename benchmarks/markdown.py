"""Writes Markdown tables into pages, and the figures that they show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARKED = re.compile(
    r"(?P<begin><!-- (?P<name>[^>]+): begin -->)(?P<newline>\n?)(?P<inner>.*?)"
    r"(?P<end><!-- (?P=name): end -->)",
    re.DOTALL,
)


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
    for name in tables:
        if f"{benchmark} {name}" not in marked(text):
            raise ValueError(
                f"{page.name} has no place for the table {name!r}: expected a line "
                f"<!-- {benchmark} {name}: begin --> and one <!-- {benchmark} {name}: end -->"
            )
    page.write_text(filled(text, {f"{benchmark} {name}": table for name, table in tables.items()}))


def marked(text: str) -> dict[str, str]:
    """Returns what a page has between markers, by their names."""
    return {found["name"]: found["inner"].rstrip("\n") for found in _MARKED.finditer(text)}


def filled(text: str, inner: Mapping[str, str]) -> str:
    """Returns a page with new text between those of its markers that `inner` names.

    What begins in the line of its marker, within a sentence, stays there.
    """

    def with_new(found: re.Match[str]) -> str:
        if found["name"] not in inner:
            return found[0]
        new = inner[found["name"]]
        if found["newline"]:
            new += "\n" if new else ""
        return found["begin"] + found["newline"] + new + found["end"]

    return _MARKED.sub(with_new, text)


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
