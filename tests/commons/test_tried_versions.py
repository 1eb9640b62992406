"""Tested sets of versions are documented, allowed by the package, and pinned for the tests."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.harness import read_result
from ci.versions import TRIED, Outcome, table

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS, DEPENDENCIES = PROJECT["optional-dependencies"], PROJECT["dependencies"]


def ranges(extra: str) -> dict[str, SpecifierSet]:
    requirements = map(Requirement, EXTRAS[extra])
    return {each.name: each.specifier for each in requirements if each.name != PROJECT["name"]}


def test_the_extras_allow_the_tried_sets_alone():
    cpu, cuda, python = ranges("cpu"), ranges("cuda"), SpecifierSet(PROJECT["requires-python"])
    for each in TRIED:
        assert each.torch in cpu["torch"] and each.torch in cuda["torch"]
        assert each.fbgemm in cpu["fbgemm-gpu-cpu"] and each.fbgemm in cuda["fbgemm-gpu"]
        assert each.torchrec in cuda["torchrec"]
        assert all(f"{minor}.1" in python for minor in each.pythons)
    assert not [*cpu["torch"].filter(["2.8.0", "2.9.0", "2.15.0"])]
    assert not [*cuda["torchrec"].filter(["1.3.0", "1.10.0"])]
    assert not [*python.filter(["3.10.9", "3.14.0"])]


def test_the_first_set_has_the_oldest_numpy_and_numba_allowed():
    others = read_result("versions")["sets"][0]["others"]
    for requirement in map(Requirement, DEPENDENCIES):
        oldest = next(bound.version for bound in requirement.specifier if bound.operator == ">=")
        assert Version(others[requirement.name]).release[:2] == Version(oldest).release[:2]


def test_the_tests_are_pinned_to_a_tried_set():
    lines = (REPOSITORY / "ci" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert (pins["torch"], pins["torchrec"], pins["fbgemm_gpu-cpu"]) in [
        (each.torch, each.torchrec, each.fbgemm) for each in TRIED
    ]
    for extra in ("cpu", "advisor", "train", "dev"):
        for name, allowed in ranges(extra).items():
            pin = next(pin for pinned, pin in pins.items() if canonicalize_name(pinned) == name)
            assert pin in allowed, name


def test_the_page_has_the_results_of_each_set():
    found = read_result("versions")["sets"]
    assert [(each["torch"], each["torchrec"], each["fbgemm"]) for each in found] == [
        (each.torch, each.torchrec, each.fbgemm) for each in TRIED for _ in each.pythons
    ]
    pythons = [python for each in TRIED for python in each.pythons]
    assert [each["python"].rpartition(".")[0] for each in found] == pythons
    assert all(each["passed"] > 1000 and not each["failed"] for each in found)
    page = (REPOSITORY / "docs" / "getting-started.md").read_text()
    assert table([Outcome(**each) for each in found]) in page
