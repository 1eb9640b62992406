"""Samples cut into pieces: time of a step, the longest sequence that fits, and the time of planning.

python -m benchmarks.split_samples
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import publish
from benchmarks.split_samples import planning, training
from benchmarks.torchrun import torchrun

BENCHMARKS = Path(__file__).parents[1]
RESULT, README = BENCHMARKS / "results" / "split_samples.json", BENCHMARKS / "README.md"


def main() -> None:
    """Prints the tables, and writes them to `README` and the figures to `RESULT`."""
    parse_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        measured, planned = Path(folder) / "training.json", Path(folder) / "planning.json"
        torchrun(training.RANKS, training.__name__, measured)
        torchrun(planning.RANKS, planning.__name__, planned)
        figures = {
            **json.loads(measured.read_text()),
            "planning": json.loads(planned.read_text()),
            "machine": machine(),
        }
    tables = training.tables(figures) | {"planning": planning.table(figures["planning"])}
    publish(figures, tables, RESULT, README, "split-samples")
    print(f"\nwritten: {RESULT.relative_to(BENCHMARKS.parent)}, {README.relative_to(BENCHMARKS.parent)}")


if __name__ == "__main__":
    main()
