"""Where numba's cache may lie, and when it is out of date."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commons.partition

LOADS = "from commons.partition import loads; print(loads([1, 2, 3], [[0, 1], [2]]))"


@pytest.fixture
def copied(tmp_path) -> Path:
    """A folder to import `commons.partition` from, without a cache."""
    (tmp_path / "commons").mkdir()
    (tmp_path / "commons" / "__init__.py").touch()
    source = Path(commons.partition.__file__).parent
    target = tmp_path / "commons" / "partition"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def _run(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=folder,
        env={"PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_place_for_the_cache_it_works_and_says_so_once(copied):
    (copied / "commons" / "partition" / "__pycache__").touch()  # a file, so that no folder can be made there
    result = _run(LOADS, copied, HOME="/dev/null")
    assert result.stdout == "[3. 3.]\n", result.stderr
    assert result.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written") == 1


def test_a_change_in_one_file_makes_the_cache_of_all_out_of_date(copied):
    hits = (
        f"{LOADS}\nfrom commons.partition import workloads\nprint(len(workloads._first_bad.stats.cache_hits))"
    )
    outputs = [_run(hits, copied, HOME=str(copied)).stdout for _ in range(2)]
    with (copied / "commons" / "partition" / "window.py").open("a") as other:
        other.write("# changed\n")
    outputs.append(_run(hits, copied, HOME=str(copied)).stdout)
    assert [output.split()[-1] for output in outputs] == ["0", "1", "0"]
