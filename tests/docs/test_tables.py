"""The tables between markers have the committed results."""

import re

import pytest

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


def test_every_marker_is_that_of_a_table_and_on_one_page(tables):
    shown = [name for page in WITH_TABLES.values() for name in marked(page)]
    assert len(shown) == len(set(shown))
    assert set(shown) <= tables.keys()
