"""Modules that run print their usage where they should, and end well."""

import json
from pathlib import Path

from tests.e2e.torchrun import REPOSITORY, python

BENCHMARKS = REPOSITORY / "benchmarks"
MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__main__")
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


def _outputs() -> dict[Path, int]:
    """When the benchmarks' results, and pages, were last written."""
    files = [*BENCHMARKS.rglob("*"), *REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]
    return {path: path.stat().st_mtime_ns for path in files if path.suffix in (".json", ".md", ".png")}


def test_a_benchmark_prints_its_usage_and_writes_nothing(tmp_path):
    assert len(MODULES) > 5
    before = _outputs()
    result = tmp_path / "ended.json"
    python(tmp_path, Path(__file__).with_name("command_lines.py"), result, *MODULES)
    for module, (ended, printed) in json.loads(result.read_text()).items():
        assert ended == 0, f"{module}: {printed}"
        assert printed.startswith(f"usage: python -m {module} "), printed
    assert [path.name for path in tmp_path.iterdir()] == [result.name]
    assert _outputs() == before


def test_processes_lose_nothing_and_end_when_one_is_killed():
    """`make cluster-check`, with few processes."""
    printed = python(REPOSITORY, "-m", "benchmarks.cluster_check", "4", "14")
    steps, planning, exchange, last = printed.splitlines()
    assert steps.startswith("4 processes, 14 steps: ") and "3 groups" in steps
    assert planning.startswith("4 processes, one killed in planning: the last one ended ")
    assert exchange.startswith("4 processes, one killed in exchange: the last one ended ")
    assert last == "nothing was lost, and all processes ended"
