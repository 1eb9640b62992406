"""`--help` of every module that runs prints its help and runs nothing; so does an unknown argument."""

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--unknown", 2)])
def test_a_benchmark_prints_its_usage_and_writes_nothing(tmp_path, argument, code):
    assert len(MODULES) > 5
    before = _outputs()
    result = tmp_path / "ended.json"
    python(tmp_path, Path(__file__).with_name("command_lines.py"), result, argument, *MODULES)
    for module, (ended, printed) in json.loads(result.read_text()).items():
        assert ended == code, f"{module}: {printed}"
        assert printed.startswith(f"usage: python -m {module} "), printed
    assert [path.name for path in tmp_path.iterdir()] == [result.name]
    assert _outputs() == before
