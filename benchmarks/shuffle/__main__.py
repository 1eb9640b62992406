"""Cost and traffic of the shuffle stage: alone, in training, and planned for up to 1,024 ranks.

python -m benchmarks.shuffle [FOLDER_WITH_u.data]
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import write_tables
from benchmarks.partition.lengths import LOGNORMAL, ML_100K, all_lengths, movielens_folder
from benchmarks.shuffle import planning
from benchmarks.shuffle.table import all_tables
from benchmarks.torchrun import torchrun

BENCHMARKS = Path(__file__).parents[1]
RESULT, README = BENCHMARKS / "results" / "shuffle.json", BENCHMARKS / "README.md"
RANKS_OF_FEATURES, RANKS_OF_TRAINING = (2, 4), 2


def main() -> None:
    """Prints the tables and, if they are complete, writes them to `README`, and `RESULT`."""
    movielens = movielens_folder(parse_arguments(__doc__, folder={"type": Path, "nargs": "?"}).folder)
    training = _on_ranks(RANKS_OF_TRAINING, "training")
    lengths = {name: of for name, of in all_lengths(movielens).items() if name in (ML_100K, LOGNORMAL)}
    figures = {
        "training": training,
        "features": {ranks: _on_ranks(ranks, "features") for ranks in RANKS_OF_FEATURES},
        "planning": planning.measure(lengths),
        "machine": machine(),
    }
    tables = all_tables(figures)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")
    if movielens is None:
        return
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(README, "shuffle", tables)
    print(f"\nwritten: {RESULT.relative_to(BENCHMARKS.parent)}, {README.relative_to(BENCHMARKS.parent)}")


def _on_ranks(ranks: int, module: str) -> Any:
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torchrun(ranks, f"benchmarks.shuffle.{module}", result)
        return json.loads(result.read_text())


if __name__ == "__main__":
    main()
