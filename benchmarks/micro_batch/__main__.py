"""Steps in micro-batches under a token cap: how balanced they are, and what memory and time they take.

Computed loads of random histories; then the demo's model, trained on two ranks:

    python -m benchmarks.micro_batch
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import publish
from benchmarks.micro_batch import balance, memory
from benchmarks.torchrun import torchrun

BENCHMARKS = Path(__file__).parents[1]
RESULT, README = BENCHMARKS / "results" / "micro_batch.json", BENCHMARKS / "README.md"


def main() -> None:
    """Prints the tables, and writes them to `README` and the figures to `RESULT`."""
    parse_arguments(__doc__)
    figures: dict[str, Any] = {"balance": balance.measure()}
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "memory.json"
        torchrun(memory.RANKS, memory.__name__, measured)
        figures["memory"] = json.loads(measured.read_text())
    figures["machine"] = machine()
    tables = balance.tables(figures["balance"]) | {"memory": memory.table(figures["memory"])}
    publish(figures, tables, RESULT, README, "micro-batch")
    print(f"\nwritten: {RESULT.relative_to(BENCHMARKS.parent)}, {README.relative_to(BENCHMARKS.parent)}")


if __name__ == "__main__":
    main()
