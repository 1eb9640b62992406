"""The tables of the benchmark of learned costs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.learning.table import all_tables

REPOSITORY = Path(__file__).parents[2]
FIGURES = json.loads((REPOSITORY / "benchmarks" / "results" / "learning.json").read_text())


def test_the_page_has_the_last_figures():
    page = (REPOSITORY / "benchmarks" / "README.md").read_text()
    for table in all_tables(FIGURES).values():
        assert table in page


def test_the_guide_has_the_speedup_with_a_rank_at_half_its_speed():
    (half,) = (record for record in FIGURES["slow_rank"] if record["phase"] == "half")
    assert f"[{half['speedup']:.2f}\ntimes as fast]" in (REPOSITORY / "docs" / "tuning.md").read_text()
