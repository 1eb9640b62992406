"""The tables of the benchmark of learned costs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.learning.table import all_tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_has_the_last_figures():
    page = (BENCHMARKS / "README.md").read_text()
    for table in all_tables(json.loads((BENCHMARKS / "results" / "learning.json").read_text())).values():
        assert table in page
