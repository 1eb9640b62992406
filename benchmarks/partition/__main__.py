"""How well the partition algorithms balance, what they move, and how long they take.

Computed loads of random histories, and of MovieLens 100K's where its folder is given:

    python -m benchmarks.partition [FOLDER_WITH_u.data]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import write_tables
from benchmarks.partition.groups import measure_groups
from benchmarks.partition.interpreter import measure_interpreter
from benchmarks.partition.lengths import all_lengths, movielens_folder
from benchmarks.partition.measure import measure
from benchmarks.partition.picture import draw
from benchmarks.partition.pieces import measure_pieces
from benchmarks.partition.placements import ROWS_PER_RANK
from benchmarks.partition.table import all_tables
from benchmarks.partition.windows import measure_windows

BENCHMARKS = Path(__file__).parents[1]
RESULT, PICTURE = BENCHMARKS / "results" / "partition.json", BENCHMARKS / "results" / "partition.png"
README = BENCHMARKS / "README.md"
DRAWS = 30
ROUNDS, SECONDS = 7, 1.0  # of the threads


def main() -> None:
    """Prints the tables and, if they are complete, writes them to `README`, with `RESULT` and `PICTURE`."""
    movielens = movielens_folder(parse_arguments(__doc__, folder={"type": Path, "nargs": "?"}).folder)
    figures: dict[str, Any] = {
        "rows_per_rank": ROWS_PER_RANK,
        "draws": DRAWS,
        "machine": {**machine(), "numpy": np.__version__, "numba": numba.__version__},
        "placements": measure(all_lengths(movielens), DRAWS),
        "pieces": measure_pieces(all_lengths(movielens), DRAWS),
        "groups": measure_groups(DRAWS),
        "windows": measure_windows(DRAWS),
        "threads": measure_interpreter(ROUNDS, SECONDS),
    }
    tables = all_tables(figures)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")
    if movielens is None:
        return
    RESULT.write_text(_json(figures))
    draw(figures["placements"], PICTURE)
    write_tables(README, "partition", tables)
    names = ", ".join(str(path.relative_to(BENCHMARKS.parent)) for path in (RESULT, PICTURE, README))
    print(f"\nwritten: {names}")


def _json(figures: dict[str, Any]) -> str:
    """A line for each record, so that a difference shows where it is."""
    lines = []
    for key, value in figures.items():
        records = isinstance(value, list)
        text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if records else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
