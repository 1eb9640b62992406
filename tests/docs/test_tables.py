"""The tables between markers, and the README's, have the committed results."""

import re

import pytest

from benchmarks.demo.table import TITLES
from benchmarks.demo.training import ARMS, DEFAULT
from benchmarks.harness import read_result
from benchmarks.markdown import PAGES, filled, marked
from benchmarks.tables import all_tables
from tests.docs.pages import REPOSITORY

WITH_TABLES = {
    page.relative_to(REPOSITORY).as_posix(): page.read_text() for page in PAGES if marked(page.read_text())
}


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    return all_tables()


@pytest.mark.parametrize("page", WITH_TABLES)
def test_marked_tables_are_those_of_the_results(tables, page):
    assert len(marked(WITH_TABLES[page])) == len(re.findall(r"<!-- [^>]+: begin -->", WITH_TABLES[page]))
    assert filled(WITH_TABLES[page], tables) == WITH_TABLES[page], "run make tables"


def test_every_table_is_on_a_page(tables):
    shown = [name for page in WITH_TABLES.values() for name in marked(page)]
    assert sorted(shown) == sorted(tables)


@pytest.mark.parametrize("model", TITLES)
def test_the_readme_has_the_speedup_of_the_default(model):
    summary = read_result(f"demo/{model}/summary")
    assert summary["arms"] == ARMS
    measured = summary["balanced"][DEFAULT]["untrimmed"]
    low, high = measured["speedup_interval"]
    shown = f"{TITLES[model]} {measured['speedup']:.2f}× ({low:.2f}–{high:.2f})"
    assert shown in marked(WITH_TABLES["README.md"])["demo speedup"]
