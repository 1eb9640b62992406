"""Writes the tables between markers on all pages, from the committed results: `make tables`."""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import importlib

from benchmarks import soak, stage_cost
from benchmarks.demo import table as demo
from benchmarks.harness import BENCHMARKS, name_result, read_result
from benchmarks.markdown import write_pages
from ci import versions


def main() -> None:
    """Writes the pages, and prints the names of changed tables."""
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args()
    write_pages(all_tables())


def all_tables() -> dict[str, str]:
    """Returns the Markdown of all tables, by the name in their markers."""
    sets = (versions.Outcome(**each) for each in read_result("versions")["sets"])
    summaries = {model: read_result(f"demo/{model}/summary") for model in demo.TITLES}
    tables = {**demo.tables(summaries), "VERSIONS sets": versions.table(sets)}
    results = [*summaries.values(), read_result("soak")]
    tables |= soak.tables(results[-1]) | stage_cost.tables()
    for name, module in BENCHMARKS.items():
        results.append(read_result(name_result(name)))
        tables |= importlib.import_module(f"benchmarks.{module}").tables(results[-1])
    on = "{cores} cores ({cpu}), torch {torch}"
    machines = {on.format(**each["machine"]) for each in results if "machine" in each}
    return tables | {"benchmarks machine": "; ".join(sorted(machines))}


if __name__ == "__main__":
    main()
