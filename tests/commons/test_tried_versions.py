"""Tested sets of versions are documented, allowed by the package, and pinned for the tests."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.harness import read_result
from ci.versions import Outcome, table
from commons.tried_versions import TRIED, note_on_untried, warn_of_untried
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.distributed.internals import RankGroup
from tests.on_ranks import on_ranks

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS, DEPENDENCIES = PROJECT["optional-dependencies"], PROJECT["dependencies"]


def ranges(extra: str) -> dict[str, SpecifierSet]:
    requirements = map(Requirement, EXTRAS[extra])
    return {requirement.name: requirement.specifier for requirement in requirements}


@pytest.mark.parametrize("each", TRIED, ids=lambda each: each.torch)
def test_the_extras_allow_every_tried_set(each):
    assert each.torch in ranges("cpu")["torch"] and each.torch in ranges("cuda")["torch"]
    assert each.fbgemm in ranges("cpu")["fbgemm-gpu-cpu"] and each.fbgemm in ranges("cuda")["fbgemm-gpu"]
    assert each.torchrec in ranges("cuda")["torchrec"]
    assert all(f"{python}.1" in SpecifierSet(PROJECT["requires-python"]) for python in each.pythons)


def test_what_was_not_tried_is_not_allowed():
    required = {requirement.name: requirement.specifier for requirement in map(Requirement, DEPENDENCIES)}
    assert required.keys() == {"numba", "numpy"}
    for allowed, outside in (
        (ranges("cpu")["torch"], ["2.8.0", "2.9.0", "2.15.0"]),
        (ranges("cuda")["torchrec"], ["1.3.0", "1.10.0"]),
        (SpecifierSet(PROJECT["requires-python"]), ["3.10.9", "3.14.0"]),
        (required["numpy"], ["1.25.2", "3.0.0"]),
    ):
        assert not any(version in allowed for version in outside)
    # A job keeps its NumPy.
    assert all(version in required["numpy"] for version in ("1.26.0", "1.26.4", "2.0.2", "2.4.6"))


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
    for extra in ("cpu", "train", "dev"):
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
    assert table([Outcome(**each) for each in found]) in (REPOSITORY / "docs" / "installing.md").read_text()


def test_patch_releases_of_a_tried_set_give_no_warning():
    assert note_on_untried("2.13.1+cu129", "1.8.2") is None
    assert note_on_untried(torch.__version__, metadata.version("torchrec")) is None


@pytest.mark.parametrize("versions", [("2.15.0", "1.9.2"), ("2.13.0", "1.9.2"), ("2.13.0", "unknown")])
def test_the_warning_names_the_untried_set_and_the_tried_ones(versions):
    note = note_on_untried(*versions)
    assert "\n" not in note and all(version in note for version in versions)
    for each in TRIED:
        torch_minor, torchrec_minor = (version.rpartition(".")[0] for version in (each.torch, each.torchrec))
        assert f"{torch_minor} with {torchrec_minor}" in note


@on_ranks(2)
def test_an_untried_torch_gives_one_warning_on_rank_0():
    warn_of_untried.cache_clear()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings_of("commons.tried_versions") as warnings,
    ):
        patch.setattr(torch, "__version__", "2.99.0")
        for _ in range(2):
            RankGroup.of()
    warn_of_untried.cache_clear()
    assert len(warnings) == (dist.get_rank() == 0) and all("torch 2.99.0" in line for line in warnings)
