"""Writes Markdown tables into pages."""

from __future__ import annotations

from pathlib import Path


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
