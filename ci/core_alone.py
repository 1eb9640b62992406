"""Tests the core, and trains with it, in a copy without extensions: `make core-alone`.

    python -m ci.core_alone [--without EXTENSION ...]

The copy has only the core's packages and tests. With `--without`, it also has all other extensions and their
tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
CORE = ("sequence_batch", "partition", "distributed", "pipeline")
# Packages and modules that the core imports.
BELOW = ("perf_model", "*.py")
PROGRAM = "examples/bert4rec.py"
SUPPORT = ("tests/*.py", "tests/commons/*.py", "tests/commons/perf_model/internals.py", "pyproject.toml")


def main() -> None:
    """Copies the core, tests it, and trains with it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition(":")[0])
    parser.add_argument("--without", nargs="+", metavar="EXTENSION", default=[], help="what to leave out")
    without = parser.parse_args().without
    extensions = {path.parent.name for path in REPOSITORY.glob("commons/extensions/*/__init__.py")}
    if unknown := set(without) - extensions:
        parser.error(f"no extensions {sorted(unknown)}; there are {sorted(extensions)}")
    kept = sorted(extensions - set(without)) if without else []
    with tempfile.TemporaryDirectory() as root:
        folder, data = Path(root) / "copy", REPOSITORY.parent / "shared"
        copy_core(folder, kept)
        if data.exists():  # tests look for it beside the repository
            (Path(root) / data.name).symlink_to(data)
        tests = [f"tests/commons/{package}" for package in CORE]
        tests += ["tests/commons/extensions"] if kept else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}

        def run(*arguments: str) -> None:
            subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=environment, check=True)

        run("pytest", *tests)
        program = (REPOSITORY / PROGRAM).read_text().replace("workload_balancer", "commons")
        (folder / "program.py").write_text(program)
        run("torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py")


def copy_core(folder: Path, extensions: list[str]) -> None:
    """Copies the core, its dependencies and tests, these extensions and their tests, and numba's cache."""
    paths = [f"commons/{name}" for name in (*CORE, *BELOW)] + list(SUPPORT)
    paths += [f"tests/commons/{name}" for name in CORE]
    if extensions:
        paths += [f"{root}/extensions/*.py" for root in ("commons", "tests/commons")]
        paths += [f"{root}/extensions/{name}" for root in ("commons", "tests/commons") for name in extensions]
        paths += ["tests/commons/extensions/together", "benchmarks"]  # some tests import benchmarks
    patterns = [f":(glob){path}" if "*" in path else path for path in paths]
    copy_files(folder, patterns)


def copy_files(folder: Path, patterns: Sequence[str] = ()) -> None:
    """Copies the files of the working tree that match, or all of them, and numba's cache of their folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    for name in subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines():
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    for cached in (REPOSITORY / "commons").rglob("__pycache__/*.nb[ic]"):  # numba's cache of these sources
        copy = folder / cached.relative_to(REPOSITORY)
        if copy.parents[1].exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(cached, copy)


if __name__ == "__main__":
    main()
