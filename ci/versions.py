"""Runs the core's tests with each matching set of torch, TorchRec, and fbgemm: `make versions`.

    python -m ci.versions [2.14.1 2.13.0/3.12 ...] [--torch-index-url URL]

Each set has its own environment under out/versions, which is removed afterwards. It takes several gigabytes
if torch is built for CUDA. The installation of the wheel must not change torch, torchrec, or fbgemm. The
oldest set has the oldest versions of other packages that pyproject.toml allows, and also tests a copy of the
core without extensions. Results go to benchmarks/results, and the printed table to docs/getting-started.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement

from benchmarks.harness import machine, read_result, write_result
from benchmarks.markdown import Cell, make_table, write_pages
from ci.core_alone import CORE, REPOSITORY

FOLDER = REPOSITORY / "out" / "versions"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_JOB = ("torch", "torchrec", "fbgemm_gpu-cpu")
NAMED_BY_SETS = ("torch", "fbgemm-gpu-cpu")
REPORTED = ("numpy", "numba", "tensordict", "polars")
TESTED_WITH = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
CORE_TESTS = (
    *(f"tests/commons/{name}" for name in (*CORE, "extensions", "test_private_names.py")),
    *("tests/test_layer_flops.py", "tests/test_model_shufflers.py", "tests/test_gradients.py"),
)


@dataclass(frozen=True)
class TriedSet:
    """Versions that belong together: torch 2.(N + 5), fbgemm 1.N and TorchRec 1.N."""

    torch: str
    torchrec: str
    fbgemm: str
    pythons: tuple[str, ...] = ("3.11",)


# pyproject.toml has the ranges of these versions.
TRIED = (
    TriedSet("2.9.1", "1.4.0", "1.4.2"),
    TriedSet("2.10.0", "1.5.1", "1.5.0"),
    TriedSet("2.11.0", "1.6.1", "1.6.0"),
    TriedSet("2.12.1", "1.7.0", "1.7.0"),
    TriedSet("2.13.0", "1.8.0", "1.8.0", ("3.11", "3.12", "3.13")),
    TriedSet("2.14.1", "1.9.2", "1.9.0"),
)


@dataclass(frozen=True)
class Outcome:
    """Test results of one set.

    Attributes:
        torch, torchrec, fbgemm, python: versions in the set.
        others: versions of other packages, by name.
        passed, skipped: number of passed and of skipped tests.
        failed: names of the failed tests.
    """

    torch: str
    torchrec: str
    fbgemm: str
    python: str
    others: dict[str, str]
    passed: int
    skipped: int
    failed: list[str]

    @property
    def name(self) -> str:
        """The name of the set on the command line."""
        return f"{self.torch}/{self.python.rpartition('.')[0]}"


class Environment:
    """A virtual environment in a folder.

    Args:
        folder: folder of the environment, whose contents are removed first.
        python: version of Python, such as "3.11".
        bounds: lines of a constraints file for all installations.
    """

    def __init__(self, folder: Path, python: str, bounds: Iterable[str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        _run([f"python{python}", "-m", "venv", str(folder / "venv")])
        self.python = str(folder / "venv" / "bin" / "python")
        self._bounds = folder / "bounds.txt"
        self._bounds.write_text("".join(f"{bound}\n" for bound in bounds))

    def install(self, *arguments: str) -> None:
        """Runs `pip install`."""
        _run([self.python, "-m", "pip", "install", "--constraint", str(self._bounds), *arguments])

    def versions(self) -> dict[str, str]:
        """Returns the versions of all installed packages by name."""
        listed = json.loads(_run([self.python, "-m", "pip", "list", "--format", "json"]))
        return {package["name"]: package["version"] for package in listed}

    def wheel(self) -> Path:
        """Builds this project's wheel and returns its path."""
        source = self.folder / "source"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "commons", source / "commons", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, source)
        _run([self.python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(self.folder), str(source)])
        return next(self.folder.glob("*.whl"))


def main() -> None:
    """Runs the sets named on the command line, or all sets."""
    parser = argparse.ArgumentParser("python -m ci.versions", description=str(__doc__).partition("\n")[0])
    parser.add_argument("sets", nargs="*", help="versions of torch, each maybe with /PYTHON; default: all")
    parser.add_argument("--torch-index-url", default="", help="package index for torch; default: pip's index")
    arguments = parser.parse_args()
    known = {f"{each.torch}/{python}": (each, python) for each in TRIED for python in each.pythons}
    sets = set(arguments.sets)
    chosen = [name for name in known if not sets or {name, name.partition("/")[0]} & sets]
    if not chosen:
        parser.error(f"no set is named {', '.join(arguments.sets)}; expected some of {', '.join(known)}")
    for python in {known[name][1] for name in chosen}:
        _run([f"python{python}", "--version"])  # fails now rather than after hours
    outcomes = {outcome.name: outcome for outcome in read_outcomes()}
    for name in chosen:
        outcomes[name] = try_set(*known[name], arguments.torch_index_url)
        sorted_outcomes = [outcomes[each] for each in known if each in outcomes]
        print(table(sorted_outcomes), flush=True)
        write_result("versions", {"sets": list(map(asdict, sorted_outcomes)), "machine": machine()})
        write_pages({"VERSIONS sets": table(sorted_outcomes)})


def try_set(each: TriedSet, python: str, torch_index_url: str) -> Outcome:
    """Makes a job's environment, installs the wheel, and runs the tests.

    Raises:
        RuntimeError: an installation fails, the wheel changes the job's torch, torchrec, or fbgemm, the tests
            do not start, or the core fails in a copy without extensions.
    """
    oldest = each is TRIED[0]
    environment = Environment(FOLDER / f"{each.torch}-{python}", python, _lower_bounds() if oldest else [])
    _install_job(environment, each, torch_index_url)
    before = environment.versions()
    wheel = environment.wheel()
    for added in (str(wheel), f"{wheel}[train]"):
        environment.install(added)
        after = environment.versions()
        if any(after[name] != before[name] for name in OF_JOB):
            raise RuntimeError(
                f"installing {added} has changed {[(name, before[name], after[name]) for name in OF_JOB]}"
            )
    environment.install("--constraint", str(REPOSITORY / "ci" / "constraints.txt"), *TESTED_WITH)
    outcome = _run_tests(environment, each)
    shutil.rmtree(environment.folder)
    return outcome


def _install_job(environment: Environment, each: TriedSet, torch_index_url: str) -> None:
    index = ["--index-url", torch_index_url] if torch_index_url else []
    environment.install(f"torch=={each.torch}", *index)
    of_torchrec = [line for line in EXTRAS["cpu"] if Requirement(line).name not in NAMED_BY_SETS]
    environment.install(f"torch=={each.torch}", f"fbgemm-gpu-cpu=={each.fbgemm}", *of_torchrec)
    environment.install("--no-deps", f"torchrec=={each.torchrec}")


def _lower_bounds() -> list[str]:
    """Returns the lowest versions that this project allows, except for packages that a set names."""
    of_extras = (line for extra in ("cpu", "advisor", "train") for line in EXTRAS[extra])
    requirements = map(Requirement, [*PROJECT["dependencies"], *of_extras])
    return sorted(
        {
            f"{requirement.name}=={bound.version}"
            for requirement in requirements
            for bound in requirement.specifier
            if bound.operator == ">=" and requirement.name not in NAMED_BY_SETS
        }
    )


def _run_tests(environment: Environment, each: TriedSet) -> Outcome:
    report = environment.folder / "report.xml"
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "NUMBA_CACHE_DIR": str(environment.folder / "numba"),
    }
    with (FOLDER / f"{environment.folder.name}.log").open("w") as log:

        def run(*arguments: str) -> int:
            command = [environment.python, "-m", *arguments]
            at: dict[str, Any] = {"cwd": REPOSITORY, "env": variables}
            return subprocess.call(command, stdout=log, stderr=subprocess.STDOUT, **at)

        run("pytest", "-n", "2", f"--junitxml={report}", *CORE_TESTS)
        if each is TRIED[0] and run("ci.core_alone"):
            raise RuntimeError(f"the core fails without extensions, with torch {each.torch}; see {log.name}")
    if not report.exists():
        raise RuntimeError(f"the tests did not run with torch {each.torch}; see {log.name}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    versions = environment.versions()
    return Outcome(
        torch=each.torch,
        torchrec=each.torchrec,
        fbgemm=each.fbgemm,
        python=_run([environment.python, "--version"]).split()[-1],
        others={name: versions[name] for name in REPORTED},
        passed=len(cases) - len(failed) - skipped,
        skipped=skipped,
        failed=[f"{case.get('classname')}::{case.get('name')}" for case in failed],
    )


def table(outcomes: Iterable[Outcome]) -> str:
    """Returns the table of docs/getting-started.md."""
    columns: dict[str, Cell] = {name: f"{{{name}}}" for name in ("torch", "torchrec", "fbgemm")}
    columns |= {"Python": "{python}", "numpy": "{others[numpy]}", "numba": "{others[numba]}"}
    columns |= {"tests passed": "{passed}", "failed": lambda each: str(len(each["failed"]))}
    return make_table(map(asdict, outcomes), columns)


def read_outcomes() -> list[Outcome]:
    """Returns the committed results of all sets."""
    return [Outcome(**each) for each in read_result("versions")["sets"]]


def _run(command: list[str]) -> str:
    """Runs a command and returns its output.

    Raises:
        RuntimeError: the command fails.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
