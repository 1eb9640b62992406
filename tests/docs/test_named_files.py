"""Checks that files and functions named on the pages exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, REPOSITORY

# Pages that cite files of other projects.
_CITING = ("docs/compared-with-others.md", "docs/coming-from-recsys-examples.md")
_FILE = re.compile(r"`([\w./-]+\.(?:py|gin|md))`")
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


def test_the_picture_of_a_batch_names_at_most_25_functions_that_exist():
    [picture] = re.findall(r"<pre>\n(.*?)</pre>", PAGES["docs/how-it-works.md"], re.DOTALL)
    code = "\n".join(
        path.read_text()
        for package in ("sequence_batch", "partition", "distributed", "pipeline")
        for path in (REPOSITORY / "commons" / package).glob("*.py")
    )
    methods = set(re.findall(r"\b([A-Z]\w+)\.([_a-z]\w+)", picture))
    functions = {name for name in re.findall(r"\b[a-z_]{4,}\b", picture) if f"\ndef {name}(" in code}
    assert {"transfer", "gather_rows", "place_within", "rebalance", "moved_to", "loss_sum"} <= functions
    for owner, name in methods:
        body = code.split(f"\nclass {owner}", 1)[1].split("\nclass ", 1)[0]
        assert f"    def {name}(" in body, f"{owner}.{name}"
    assert len(methods) + len(functions) <= 25


def test_all_say_the_same_of_the_first_compilation():
    sources = [*(REPOSITORY / "commons").rglob("*.py"), *(REPOSITORY / "benchmarks" / "demo").glob("*.py")]
    # A message goes on in the next line's string.
    texts = [re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources]
    sentences = [
        " ".join(sentence.split())
        for text in [*PAGES.values(), *texts]
        for sentence in re.split(r"(?<=[.:;])\s", text)
        if re.search(r"compil|numba", sentence) and re.search(r"\b(minutes?|seconds)\b", sentence)
    ]
    assert len(sentences) >= 5
    for sentence in sentences:
        assert "about 20 seconds" in sentence, sentence
