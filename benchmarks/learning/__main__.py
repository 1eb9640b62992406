"""Learned costs where a rank is slow, and where FLOPs do not tell a model's time.

python -m benchmarks.learning
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.command_line import parse_arguments
from benchmarks.learning.table import all_tables, dense_part_figures, slow_rank_figures
from benchmarks.machine import machine
from benchmarks.markdown import publish
from benchmarks.torchrun import torchrun

BENCHMARKS = Path(__file__).parents[1]
RESULT, README = BENCHMARKS / "results" / "learning.json", BENCHMARKS / "README.md"
RANKS = 2


def main() -> None:
    """Prints the tables and writes them to `README`, with `RESULT`."""
    parse_arguments(__doc__)
    measured = {}
    with TemporaryDirectory() as folder:
        for name in ("slow_rank", "dense_part"):
            output = Path(folder) / f"{name}.json"
            torchrun(RANKS, f"benchmarks.learning.{name}", output)
            measured[name] = json.loads(output.read_text())
    figures = {
        "slow_rank": slow_rank_figures(measured["slow_rank"]),
        "dense_part": dense_part_figures(measured["dense_part"]),
        "machine": machine(),
    }
    tables = all_tables(figures)
    publish(figures, tables, RESULT, README, "learning")


if __name__ == "__main__":
    main()
