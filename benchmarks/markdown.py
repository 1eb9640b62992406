"""Writes Markdown tables into pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
# A format string for a record, such as "{step_ms[median]:.0f}", or a function of the record.
Cell = str | Callable[[Any], str]

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "benchmarks" / "README.md",
    *(REPOSITORY / "docs").glob("*.md"),
]
_MARKED = re.compile(
    r"(?P<begin><!-- (?P<name>[^>]+): begin -->)(?P<newline>\n?)(?P<inner>.*?)"
    r"(?P<end><!-- (?P=name): end -->)",
    re.DOTALL,
)


def markdown_table(titles: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table, padded so that it also reads well in a terminal."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [titles, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def make_table(records: Iterable[Any], columns: Mapping[str, Cell]) -> str:
    """Returns a table with a row for each record."""
    return markdown_table(
        list(columns), [[show(record, cell) for cell in columns.values()] for record in records]
    )


def pivot(records: Iterable[Any], rows: Mapping[str, Cell], column: Cell, cell: Cell) -> str:
    """Returns a table with a row for each distinct `rows`, and a column for each distinct `column`.

    A cell joins the texts of its records with " / ". A cell without records is "–".
    """
    cells: dict[tuple[str, ...], dict[str, list[str]]] = {}
    titles: dict[str, None] = {}
    for record in records:
        row, title = tuple(show(record, each) for each in rows.values()), show(record, column)
        titles[title] = None
        cells.setdefault(row, {}).setdefault(title, []).append(show(record, cell))
    return markdown_table(
        [*rows, *titles],
        [[*row, *(" / ".join(found.get(each, ["–"])) for each in titles)] for row, found in cells.items()],
    )


def join_rows(records: Iterable[Record], rows: Mapping[str, Cell], columns: Mapping[str, Cell]) -> str:
    """Returns a table with a row for each distinct `rows`. A cell joins its records' texts with " / "."""
    cells = [
        record | {"title": title, "text": show(record, cell)}  # type: ignore[operator]
        for record in records
        for title, cell in columns.items()
    ]
    return pivot(cells, rows, "{title}", "{text}")


def show(record: Any, cell: Cell) -> str:
    """Returns the text of a cell for a record."""
    return cell.format_map(record) if isinstance(cell, str) else cell(record)


def marked(text: str) -> dict[str, str]:
    """Returns the texts between a page's markers, by the names of the markers."""
    return {found["name"]: found["inner"].rstrip("\n") for found in _MARKED.finditer(text)}


def filled(text: str, inner: Mapping[str, str]) -> str:
    """Returns a page with new text between the markers that `inner` names.

    Text that begins on its marker's line, such as a part of a sentence, stays on that line.
    """

    def with_new(found: re.Match[str]) -> str:
        if found["name"] not in inner:
            return found[0]
        new = inner[found["name"]]
        if found["newline"]:
            new += "\n" if new else ""
        return found["begin"] + found["newline"] + new + found["end"]

    return _MARKED.sub(with_new, text)


def write_pages(tables: Mapping[str, str]) -> None:
    """Writes tables between their markers, `<!-- NAME: begin -->` and `… end -->`. Prints changed names.

    Pages have the tables that somebody decides by. A benchmark prints all of its tables.
    """
    pages = {page: page.read_text() for page in PAGES}
    before = {page: marked(text) for page, text in pages.items()}
    for page, text in pages.items():
        changed = [name for name, old in before[page].items() if tables.get(name, old) != old]
        for name in changed:
            print(f"{page.relative_to(REPOSITORY)}: {name}")
        if changed:
            page.write_text(filled(text, tables))
