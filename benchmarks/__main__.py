"""Runs a benchmark, prints its tables, and writes its figures to `results` and the tables to the pages."""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import importlib
import inspect
import json
from pathlib import Path

import torch

from benchmarks.harness import BENCHMARKS, machine, name_result, write_result
from benchmarks.markdown import write_pages
from benchmarks.partition.placements import find_movielens

# Benchmarks that print but do not write their figures if the folder of MovieLens 100K is missing.
NEED_MOVIELENS = ("loading", "partition", "public-data")


def main() -> None:
    """Runs the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("argument", nargs="?", help="a folder with its data")
    given = parser.parse_args()
    name, argument = given.name, given.argument
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[name]}")
    takes = list(inspect.signature(module.measure).parameters.values())
    if argument is not None and not takes:
        parser.error(f"{name} takes no argument, got {argument!r}")
    if argument is None and takes and takes[0].default is inspect.Parameter.empty:
        parser.error(f"{name} needs a folder with its data: make bench NAME={name} DATA=…")
    if name in NEED_MOVIELENS:
        argument = find_movielens(None if argument is None else Path(argument))
    torch.set_num_threads(1)
    measured = module.measure() if argument is None else module.measure(argument)
    measured.setdefault("machine", machine())
    figures = json.loads(json.dumps(measured))  # as `make tables` will read them
    tables = module.tables(figures)
    for title, table in tables.items():
        print(f"\n{title}\n\n{table}")
    if name in NEED_MOVIELENS and argument is None:
        return
    write_result(name_result(name), figures)
    write_pages(tables)


if __name__ == "__main__":
    main()
