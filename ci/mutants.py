"""Tells which faults of a list the tests catch.

    python -m ci.mutants [--names NAME ...] [--output FILE.json]

`ci/mutants.json` lists one-line faults. Their lines were drawn with `random.Random(61)`, uniformly over the
lines of code of three groups: distributed, sequence_batch, and pipeline; partition; and extensions. Comments,
imports, messages, and signatures were left out. Each line got the first sensible fault of a list: a
comparison or index off by one, a dropped or wrong operand, a changed sign, swapped values, a dropped
statement, a forced condition. A line without one, or with one that changes nothing, gave way to the next.
Faults of the kind "refusal" were chosen instead: each refuses something that is supported.

Each fault is made in a copy. Its room, the tests of its package, runs first, and then the whole suite for
what the rooms miss. An existing output is continued. A fault that only a timeout showed is `suspicious`: run
it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ci.core_alone import REPOSITORY, copy_files

LIST = REPOSITORY / "ci" / "mutants.json"
TOGETHER = ("distributed", "sequence_batch", "pipeline")  # packages that share a room
TIMEOUT_S = 2400.0
HUNG = ("no answer within", "timed out", "Timeout", "RankError")


def main() -> None:
    """Runs the rooms of all faults, and the whole suite for those that their rooms miss."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="faults to run; default: all")
    parser.add_argument("--output", type=Path, default=Path("mutants_caught.json"))
    args = parser.parse_args()
    mutants = {mutant["name"]: mutant for mutant in json.loads(LIST.read_text())["mutants"]}
    names = args.names or list(mutants)
    if unknown := set(names) - mutants.keys():
        parser.error(f"no faults {sorted(unknown)}")
    results: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}

    def run(name: str, by: str) -> None:
        before = results.get(name, {"seconds": 0.0})
        result = run_tests(mutants[name], by)
        result["seconds"] = round(result["seconds"] + before["seconds"], 1)
        results[name] = result
        args.output.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")

    for name in tqdm([name for name in names if name not in results], "rooms"):
        run(name, "room")
    missed = [name for name in names if not results[name]["caught"] and results[name]["ran"] == "room"]
    for name in tqdm(missed, "whole suite"):
        run(name, "suite")
    missed = [name for name in names if not results[name]["caught"]]
    print(f"{len(names) - len(missed)} of {len(names)} faults are caught; missed: {missed or 'none'}")


def run_tests(mutant: dict[str, str], by: str) -> dict[str, Any]:
    """Returns what a fault's room finds in a copy, or with `by="suite"`, what all other tests find."""
    start = time.monotonic()
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
        code, output = _pytest(folder, room if by == "room" else others)
    failed = code not in (0, 5)  # 5: no tests
    lines = output.strip().splitlines() if failed else []
    named = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
    errors = [line[1:].strip() for line in lines if line.startswith("E ") and "--- rank" not in line]
    # A rank that waits for one that failed does not answer either.
    answered = [error for error in errors if not any(words in error for words in HUNG)]
    return {
        "caught": failed,
        "by": by if failed else None,
        "ran": by,
        "test": named[0].partition(" - ")[0] if named else None,
        "error": (answered or errors or lines or [""])[-1],
        "suspicious": failed and not answered,
        "seconds": time.monotonic() - start,
    }


def room_of(file: str, folder: Path) -> list[str]:
    """Returns the existing folders of tests of a product file's package."""
    package, *below = Path(file).parts[1:]
    names = list(TOGETHER) if package in TOGETHER else [package]
    if package == "extensions" and len(below) > 1:
        names = [f"extensions/{below[0]}", "extensions/together"]
    tests = [f"tests/commons/{name}" for name in names]
    return [path for path in tests if (folder / path).exists()]


def _pytest(folder: Path, arguments: list[str]) -> tuple[int, str]:
    """Returns the exit status and the output of pytest, which stops at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "1", "PYTHONPATH": str(folder)}
    with tempfile.TemporaryFile("w+") as log:  # not a pipe, which processes left behind would keep open
        at: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **at)
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.write(f"\nE   timed out after {TIMEOUT_S:g} s")
        log.seek(0)
        return process.returncode, log.read()


if __name__ == "__main__":
    main()
