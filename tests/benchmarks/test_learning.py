"""The figures of the benchmark of learned costs."""

from __future__ import annotations

import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FIGURES = json.loads((REPOSITORY / "benchmarks" / "results" / "learning.json").read_text())


def test_the_guide_has_the_speedup_with_a_rank_at_half_its_speed():
    (half,) = (record for record in FIGURES["slow_rank"] if record["phase"] == "half")
    assert f"[{half['speedup']:.2f}\ntimes as fast]" in (REPOSITORY / "docs" / "tuning.md").read_text()
