"""Tells which faults of a list the tests catch.

    python -m ci.mutants [--names NAME ...] [--output FILE.json]

`ci/mutants.json` lists one-line faults. Their lines were drawn with `random.Random(61)`, uniformly over the
lines of code of three groups: distributed, sequence_batch, and pipeline; partition; and extensions. Comments,
imports, messages, and signatures were left out. Each line got the first sensible fault of a list: a
comparison or index off by one, a dropped or wrong operand, a changed sign, swapped values, a dropped
statement, a forced condition. A line without one, or with one that changes nothing, gave way to the next.
Faults of the kind "refusal" were chosen instead: each refuses something that is supported.

Each fault is made in a copy, in which pytest stops at the first failure. The tests of the fault's package
run first, and the whole suite only if they miss it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ci.core_alone import REPOSITORY, copy_files

LIST = REPOSITORY / "ci" / "mutants.json"
TOGETHER = ("distributed", "sequence_batch", "pipeline")  # packages that share a room
TIMEOUT_S = 2400.0


def main() -> None:
    """Runs the tests of all faults, and prints a line for each."""
    mutants = {mutant["name"]: mutant for mutant in json.loads(LIST.read_text())["mutants"]}
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--names", nargs="+", choices=mutants, default=list(mutants), metavar="NAME")
    names = parser.parse_args().names
    missed = []
    for name in tqdm(names, "faults"):
        test = catching_test(mutants[name])
        tqdm.write(f"{name}: {test or 'missed'}")
        missed += [] if test else [name]
    print(f"{len(names) - len(missed)} of {len(names)} faults are caught; missed: {missed or 'none'}")


def catching_test(mutant: dict[str, str]) -> str:
    """Returns the first test that fails with a fault, or "" if none does."""
    with tempfile.TemporaryDirectory() as root:
        folder, data = Path(root) / "copy", REPOSITORY.parent / "shared"
        copy_files(folder)
        if data.exists():  # tests look for it beside the repository
            (Path(root) / data.name).symlink_to(data)
        file = folder / mutant["file"]
        source = file.read_text()
        if (count := source.count(mutant["before"])) != 1:
            raise SystemExit(f"{mutant['name']}: its line is {count} times in {mutant['file']}, not once")
        file.write_text(source.replace(mutant["before"], mutant["after"]))
        room = room_of(mutant["file"], folder)
        others = ["tests", *(f"--ignore={tests}" for tests in room)]
        return (_first_failure(folder, room) if room else "") or _first_failure(folder, others)


def room_of(file: str, folder: Path) -> list[str]:
    """Returns the existing folders of tests of a product file's package."""
    package, *below = Path(file).parts[1:]
    names = list(TOGETHER) if package in TOGETHER else [package]
    if package == "extensions" and len(below) > 1:
        names = [f"extensions/{below[0]}", "extensions/together"]
    tests = [f"tests/commons/{name}" for name in names]
    return [path for path in tests if (folder / path).exists()]


def _first_failure(folder: Path, tests: Sequence[str]) -> str:
    """Returns the first test that fails or hangs, or "" if all pass, or there are none."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "1", "PYTHONPATH": str(folder)}
    with tempfile.TemporaryFile("w+") as log:  # not a pipe, which processes left behind would keep open
        at: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **at)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{TIMEOUT_S:g} s without an answer"
        log.seek(0)
        failures = [line for line in log if line.startswith(("FAILED ", "ERROR "))]
    passed = code in (0, 5)  # 5: no tests
    return "" if passed else (failures or ["an error of pytest"])[0].partition(" - ")[0].strip()


if __name__ == "__main__":
    main()
