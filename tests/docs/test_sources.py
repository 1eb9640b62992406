"""Checks that statements about other projects have a source that a reader can open."""

import re

import pytest

from tests.docs.pages import PAGES, REPOSITORY

COMPARISON = "docs/compared-with-others.md"
TRIED = "docs/in-your-trainer.md"  # names the commit at which each program was tried
WITH_BENCHMARKS = {**PAGES, "benchmarks/README.md": (REPOSITORY / "benchmarks/README.md").read_text()}
PEER = re.compile(
    r"recsys-examples|\b(verl|slime|AReaL|transformers|OrchMLLM|MTGenRec|FreeScale|TurboGR|TorchEasyRec)\b"
)
_CITATION = re.compile(r"\[\[(\d+)\]\]\(#sources\)")
_SOURCE = re.compile(r"^(\d+)\. (.*(?:\n {3,}.*)*)", re.MULTILINE)
_TARGET = re.compile(r"\]\(([^)#\s]*)[^)]*\)")
_DATE = re.compile(r"\b20\d\d-\d\d\b")


def _statements(page: str) -> list[str]:
    """Returns a page's paragraphs, bullets and table rows, without code, headings and sources."""
    text = re.sub(r"^ *```.*?^ *```$", "", WITH_BENCHMARKS[page], flags=re.DOTALL | re.MULTILINE)
    before = text.partition("\n## Sources\n")[0]
    parts = re.split(r"\n\s*\n|\n(?=[-|] ?)", before)
    return [part for part in parts if not part.startswith("#")]


def _has_sources(page: str) -> bool:
    return page == TRIED or "\n## Sources\n" in WITH_BENCHMARKS.get(page, "")


@pytest.mark.parametrize("page", [page for page in WITH_BENCHMARKS if not _has_sources(page)])
def test_statements_about_peers_link_to_sources(page):
    folder = (REPOSITORY / page).parent
    for statement in filter(PEER.search, _statements(page)):
        targets = [(folder / target).resolve() for target in _TARGET.findall(statement)]
        linked = [name for name in WITH_BENCHMARKS if REPOSITORY / name in targets]
        assert any(map(_has_sources, linked)), f"{page} names a peer without a source:\n{statement}"


def test_every_statement_of_the_comparison_cites():
    for statement in filter(PEER.search, _statements(COMPARISON)):
        header = statement.startswith("| | here |")
        assert header or _CITATION.search(statement), f"without a source:\n{statement}"


@pytest.mark.parametrize("page", [COMPARISON, "docs/coming-from-recsys-examples.md"])
def test_citations_match_sources(page):
    text, _, sources = WITH_BENCHMARKS[page].partition("\n## Sources\n")
    listed = dict(_SOURCE.findall(sources))
    assert list(listed) == [str(number) for number in range(1, len(listed) + 1)]
    assert set(_CITATION.findall(text)) == set(listed)
    read = _DATE.search(sources.partition("\n1. ")[0])
    for number, source in listed.items():
        assert "`" in source or "](http" in source, f"{page}: source {number} names no file, thread or paper"
        assert read or _DATE.search(source), f"{page}: source {number} has no date"


def test_every_program_tried_has_a_commit():
    text = WITH_BENCHMARKS[TRIED]
    programs = text.split("\n## ")[1:]
    assert len(programs) == 5
    for program in programs:
        level, commit = re.search(
            r"^\*\*([ABC])\.\*\* \[.*?\]\(http\S+\) at\s(\w{7})\b", program, re.M
        ).groups()
        assert re.search(rf"\| {commit} \| {level} \|", text), program[:40]


@pytest.mark.parametrize("page", WITH_BENCHMARKS)
def test_peers_are_named(page):
    found = [part for part in _statements(page) if re.search(r"\bpeers\b", part, re.IGNORECASE)]
    assert not found, f"{page}: which peers?\n{found[0]}"
