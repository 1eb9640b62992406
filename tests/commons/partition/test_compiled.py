"""Where numba's cache may lie, and when it is out of date."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commons.partition

CACHE = Path("commons/partition/__pycache__")
WARNING = "numba's cache cannot be used ("
BOUND = "from commons.partition import lower_bound; print(lower_bound([1, 2, 3], 2))"
HITS = f"{BOUND}\nfrom commons.partition import kernels\nprint(len(kernels.shortest_time.stats.cache_hits))"


@pytest.fixture(scope="module")
def cached(tmp_path_factory) -> Path:
    """A folder to import `commons.partition` from, with a cache."""
    folder = tmp_path_factory.mktemp("cached")
    (folder / "commons").mkdir()
    for name in ("__init__.py", "lazy_names.py"):
        shutil.copy(Path(commons.__file__).parent / name, folder / "commons")
    source = Path(commons.partition.__file__).parent
    shutil.copytree(source, folder / CACHE.parent, ignore=shutil.ignore_patterns("__pycache__"))
    _run(HITS, folder)
    return folder


@pytest.fixture
def copied(cached, tmp_path) -> Path:
    return shutil.copytree(cached, tmp_path / "copied")


def _run(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_place_for_the_cache_it_works_and_says_so_once(copied):
    shutil.rmtree(copied / CACHE)
    (copied / CACHE).touch()  # a file, so that no folder can be made there
    result = _run(BOUND, copied, HOME="/dev/null")
    assert result.stdout == "1.0\n", result.stderr
    assert result.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written") == 1


def test_a_change_in_one_file_makes_the_cache_of_all_out_of_date(copied):
    outputs = [_run(HITS, copied).stdout]
    with (copied / CACHE.with_name("kernels.py")).open("a") as other:
        other.write("# changed\n")
    outputs.append(_run(HITS, copied).stdout)
    assert [output.split()[-1] for output in outputs] == ["1", "0"]


@pytest.mark.parametrize(("kind", "damage"), [("nbi", "garbage"), ("nbc", "unreadable")])
def test_damaged_files_are_compiled_and_written_again(copied, kind, damage):
    files = list(copied.rglob(f"*.{kind}"))
    assert files
    for file in files:
        contents = file.read_bytes()
        file.unlink()
        if damage == "unreadable":  # a folder, which root cannot read as a file, either
            file.mkdir()
        else:
            file.write_bytes(contents[::-1])
    result = _run(HITS, copied)
    assert result.stdout.startswith("1.0") and result.stdout.split()[-1] == "0", result.stderr
    assert result.stderr.count(WARNING) == result.stderr.count("\n") == 1, result.stderr
    if damage != "unreadable":
        assert _run(HITS, copied).stdout.split()[-1] == "1"


def test_with_a_full_disk_it_works_and_says_so_once(copied):
    shutil.rmtree(copied / CACHE)
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
    result = _run(full + HITS, copied)
    assert result.stdout.startswith("1.0"), result.stderr
    assert result.stderr.count(WARNING) == result.stderr.count("\n") == 1, result.stderr
