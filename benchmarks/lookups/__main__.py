"""Step time, bytes and unique ids of each partitioner where lookups take a share of the step.

python -m benchmarks.lookups
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.command_line import parse_arguments
from benchmarks.lookups.table import all_tables
from benchmarks.machine import machine
from benchmarks.markdown import publish
from benchmarks.torchrun import torchrun

BENCHMARKS = Path(__file__).parents[1]
RESULT, README = BENCHMARKS / "results" / "lookups.json", BENCHMARKS / "README.md"
RANKS = 2


def main() -> None:
    """Prints the tables and writes them to `README`, with `RESULT`."""
    parse_arguments(__doc__)
    with TemporaryDirectory() as folder:
        measured = Path(folder) / "result.json"
        torchrun(RANKS, "benchmarks.lookups.training", measured)
        figures = json.loads(measured.read_text()) | {"machine": machine()}
    tables = all_tables(figures)
    publish(figures, tables, RESULT, README, "lookups")


if __name__ == "__main__":
    main()
