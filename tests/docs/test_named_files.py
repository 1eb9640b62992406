"""Checks that files and functions named on the pages exist."""

import importlib
import inspect
import re

import pytest

from commons.distributed import Extension
from tests.docs.pages import PAGES, REPOSITORY

# Pages that cite files of other projects.
_CITING = (
    "docs/compared-with-others.md",
    "docs/coming-from-recsys-examples.md",
    "docs/in-your-trainer.md",
)
_FILE = re.compile(r"`([\w./-]+\.(?:py|gin|md))`")
_EXTENSIONS = REPOSITORY / "commons" / "extensions"
_FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def files() -> set[str]:
    folders = ("commons", "hstu", "sid_gr", "benchmarks", "examples", "tests", "ci", "docs")
    paths = [
        *REPOSITORY.glob("*.*"),
        *(path for each in folders for path in (REPOSITORY / each).rglob("*.*")),
    ]
    return {path.relative_to(REPOSITORY).as_posix() for path in paths}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in _CITING])
def test_files_named_on_the_pages_exist(files, page):
    for name in _FILE.findall(_FENCED.sub("", PAGES[page])):
        assert any(f"/{path}".endswith(f"/{name}") for path in files), f"{page} names {name}"


def test_the_way_of_a_batch_names_functions_that_exist():
    way = PAGES["docs/how-it-works.md"].partition("## A batch's way")[2].partition("\n## ")[0]
    rows = re.findall(r"^\d+\. `([\w.]+)` \(`([\w/.]+)`\)", way, re.MULTILINE)
    assert rows
    for function, path in rows:
        owner, _, name = function.rpartition(".")
        code = (REPOSITORY / "commons" / path).read_text()
        if owner:
            code = code.split(f"\nclass {owner}", 1)[1].split("\nclass ", 1)[0]
        assert re.search(rf"^{'    ' if owner else ''}def {name}\(", code, re.MULTILINE), function


def test_the_table_of_hooks_is_that_of_the_extensions():
    page = PAGES["docs/how-it-works.md"]
    header, *rows = re.findall(r"^\|(?:hook|`\w+`)\|.*\|$", page, re.MULTILINE)
    folders = [cell.strip("`") for cell in header.strip("|").split("|")[2:]]
    assert set(folders) == {path.name for path in _EXTENSIONS.iterdir() if (path / "__init__.py").exists()}
    shown = {}
    for row in rows:
        hook, _, *cells = row.removeprefix("|").removesuffix("|").split("|")
        shown[hook.strip("`")] = {folder for folder, cell in zip(folders, cells, strict=True) if cell}
    hooks = {name: value for name, value in vars(Extension).items() if inspect.isfunction(value)}
    hooks |= {name: value for name, value in vars(Extension).items() if isinstance(value, property)}
    assert shown == {hook: set(filter(lambda of: _hooks_into(of, hook), folders)) for hook in hooks}


def _hooks_into(folder: str, hook: str) -> bool:
    package = importlib.import_module(f"commons.extensions.{folder}")
    exported = (getattr(package, name) for name in package.__all__)
    return any(
        isinstance(value, type) and issubclass(value, Extension) and hook in vars(value) for value in exported
    )
