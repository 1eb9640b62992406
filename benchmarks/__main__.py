"""Runs a benchmark, prints its tables, and writes its figures to `results` and the tables to the pages."""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import importlib
import inspect
import json
from pathlib import Path

import torch

from benchmarks.harness import BENCHMARKS, result_of, write_result
from benchmarks.markdown import write_pages
from benchmarks.partition.lengths import movielens_folder

# Without the folder with MovieLens 100K, they only print.
NEED_MOVIELENS = ("loading", "partition", "shuffle")


def main() -> None:
    """Runs the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("argument", nargs="?", help="what it takes: DATA or CHECKOUT of the Makefile")
    given = parser.parse_args()
    name, argument = given.name, given.argument
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[name]}")
    takes = list(inspect.signature(module.measure).parameters.values())
    if argument is not None and not takes:
        parser.error(f"{name} takes no argument, got {argument!r}")
    if argument is None and takes and takes[0].default is inspect.Parameter.empty:
        parser.error(f"{name} needs a folder with its data: make bench NAME={name} DATA=…")
    if name in NEED_MOVIELENS:
        argument = movielens_folder(None if argument is None else Path(argument))
    torch.set_num_threads(1)
    measured = module.measure() if argument is None else module.measure(argument)
    figures = json.loads(json.dumps(measured))  # as `make tables` will read them
    tables = module.tables(figures) if hasattr(module, "tables") else {}
    for title, table in tables.items():
        print(f"\n{title}\n\n{table}")
    if not tables:
        print(json.dumps(figures, indent=1))
    if name in NEED_MOVIELENS and argument is None:
        return
    write_result(result_of(name), figures)
    write_pages(tables)


if __name__ == "__main__":
    main()
