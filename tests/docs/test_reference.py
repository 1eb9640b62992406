"""The pages of the reference list the names that the library exports, and these are few."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from ci.count_docs import names_on
from tests.e2e.test_installed import IN_A_CHECKOUT

COMMONS = Path(__file__).parents[2] / "commons"
MOST_NAMES = 60
PROVISIONAL = "Provisional: may change in a minor version."


def exported() -> dict[str, object]:
    """Returns everything that modules of the wheel export, by full name."""
    found = {}
    for path in COMMONS.rglob("*.py"):
        parts = path.relative_to(COMMONS.parent).with_suffix("").parts
        if "__all__" in path.read_text() and parts[1] not in (*IN_A_CHECKOUT, "lazy_names"):
            module = import_module(".".join(part for part in parts if part != "__init__"))
            found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return found


@pytest.fixture(scope="module")
def listed() -> dict[str, list[str]]:
    """Full names as a checkout exports them. A module's function of the same name is the package's."""
    pages = {page: names_on(page) for page in ("stable", "provisional")}
    assert all(name.startswith("workload_balancer.") for names in pages.values() for name in names)
    return {page: [_exported_as(name) for name in names] for page, names in pages.items()}


def _exported_as(name: str) -> str:
    parts = ["commons", *name.split(".")[1:]]
    if parts[1] == "partition" and len(parts) == 4:  # partition.refined.refined is partition.refined
        del parts[2]
    return ".".join(parts)


def test_the_reference_lists_each_exported_name_once(listed):
    names = [name for of_page in listed.values() for name in of_page]
    assert sorted(names) == sorted(exported())
    assert len(names) <= MOST_NAMES


def test_provisional_names_say_so(listed):
    objects = exported()
    for page, names in listed.items():
        for name in names:
            if inspect.isclass(objects[name]) or inspect.isfunction(objects[name]):
                is_provisional = PROVISIONAL in inspect.getdoc(objects[name])
                assert is_provisional == (page == "provisional"), name
