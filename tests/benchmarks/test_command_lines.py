"""Modules that run print their usage where they should, and end well."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

from tests.e2e.torchrun import REPOSITORY, python

MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__main__")
    for path in sorted((REPOSITORY / "benchmarks").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


def _help(folder: Path) -> dict[str, tuple[object, str]]:
    """Asks each module for help, as `python -m MODULE --help` does in a folder; returns how it ended."""
    ended = {}
    for module in MODULES:
        code, printed = None, io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            mock.patch.object(sys, "argv", [module, "--help"]),
        ):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code
        ended[module] = (code, printed.getvalue())
    return ended


def test_a_benchmark_prints_its_usage_and_writes_nothing(pools, tmp_path):
    assert len(MODULES) > 5
    for module, (ended, printed) in pools(1).run(_help, tmp_path)[0].items():
        assert ended == 0, f"{module}: {printed}"
        assert printed.startswith(f"usage: python -m {module} "), printed
    assert list(tmp_path.iterdir()) == []


def test_processes_lose_nothing_and_end_when_one_is_killed():
    """`make cluster-check`, with few processes."""
    printed = python(REPOSITORY, "-m", "benchmarks.cluster_check", "4", "14")
    steps, planning, exchange, last = printed.splitlines()
    assert steps.startswith("4 processes, 14 steps: ") and "3 groups" in steps
    assert planning.startswith("4 processes, one killed in planning: the last one ended ")
    assert exchange.startswith("4 processes, one killed in exchange: the last one ended ")
    assert last == "nothing was lost, and all processes ended"
