"""Writes the tables between markers on all pages, from the committed results: `make tables`."""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import importlib

from benchmarks.demo import table as demo
from benchmarks.harness import BENCHMARKS, read_result, result_of
from benchmarks.markdown import write_pages
from ci import versions


def main() -> None:
    """Writes the pages and prints what changed."""
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args()
    write_pages(all_tables())


def all_tables() -> dict[str, str]:
    """Returns Markdown by the name in a table's markers."""
    sets = (versions.Outcome(**each) for each in read_result("versions")["sets"])
    tables = {
        **demo.tables({model: read_result(f"demo/{model}/summary") for model in demo.TITLES}),
        "VERSIONS sets": versions.table(sets),
    }
    for name, module in BENCHMARKS.items():
        of_benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), "tables", None)
        if of_benchmark is not None:
            tables |= of_benchmark(read_result(result_of(name)))
    return tables


if __name__ == "__main__":
    main()
