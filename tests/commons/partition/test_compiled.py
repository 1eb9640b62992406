"""Where numba's cache may lie, and when it is out of date."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commons.partition

CACHE = Path("commons/partition/__pycache__")
WARNING = "numba's cache cannot be used ("
CALLING = """\
from commons.partition.compiled import compiled
from commons.partition.kernels import num_bits

@compiled
def bits_of(count):
    return num_bits(count)
"""
HITS = """\
from commons.partition import calling
print(calling.bits_of(5))
print(len(calling.bits_of.stats.cache_hits))
"""
ALL_HITS = (
    """\
from commons.partition import kernels, lower_bound
print(lower_bound([1, 2, 3], 2))
print(len(kernels.shortest_time.stats.cache_hits))
"""
    + HITS
)


@pytest.fixture(scope="module")
def cached(tmp_path_factory) -> Path:
    """A folder to import `commons.partition` from, with a cache."""
    folder = tmp_path_factory.mktemp("cached")
    (folder / "commons").mkdir()
    for name in ("__init__.py", "lazy_names.py"):
        shutil.copy(Path(commons.__file__).parent / name, folder / "commons")
    source = Path(commons.partition.__file__).parent
    shutil.copytree(source, folder / CACHE.parent, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / CACHE.with_name("calling.py")).write_text(CALLING)
    _run(ALL_HITS, folder)
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


def _no_place(cache: Path) -> None:
    shutil.rmtree(cache)
    cache.touch()  # a file, so that no folder can be made there


def _garbage(cache: Path) -> None:
    for file in cache.glob("*.nbi"):
        file.write_bytes(file.read_bytes()[::-1])


FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))\n"


@pytest.mark.parametrize(
    ("damage", "program"),
    [(_no_place, HITS), (_garbage, HITS), (shutil.rmtree, FULL_DISK + HITS)],
    ids=["no place", "garbage", "full disk"],
)
def test_without_a_cache_that_can_be_used_it_works_and_says_so_once(copied, damage, program):
    damage(copied / CACHE)
    home = {"HOME": "/dev/null"} if damage is _no_place else {}
    result = _run(program, copied, **home)
    assert result.stdout == "3\n0\n", result.stderr
    assert result.stderr.count(WARNING) == result.stderr.count("\n") == 1, result.stderr
    if damage is _garbage:
        assert _run(HITS, copied).stdout == "3\n1\n"  # written again


def test_a_change_of_the_kernels_makes_the_cache_of_all_out_of_date(copied):
    assert _run(ALL_HITS, copied).stdout == "1.0\n1\n3\n1\n"
    kernels = copied / CACHE.with_name("kernels.py")
    kernels.write_text(kernels.read_text().replace("    bits = ONE\n", "    bits = ONE + ONE + ONE + ONE\n"))
    assert _run(ALL_HITS, copied).stdout == "1.0\n0\n4\n0\n"
