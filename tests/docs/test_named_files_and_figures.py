"""Checks that files named on the pages exist, and that the README has the figures of the demo's last run."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(("model", "row"), [("hstu", "HSTU, 2 ranks"), ("sid_gr", "SID-GR, 2 ranks")])
def test_the_readme_has_the_steps_that_the_demo_measured(model, row):
    summary = json.loads((REPOSITORY / f"benchmarks/results/demo/{model}/summary.json").read_text())
    measured = summary["balanced"]["refined, all_to_all"]["untrimmed"]
    low, high = measured["speedup_interval"]
    times = [f"{measured[f'seconds_per_step{when}'] * 1e3:.0f} ms" for when in ("_as_loaded", "")]
    shown = [*times, f"{measured['speedup']:.2f}× (95% CI {low:.2f}–{high:.2f})"]
    assert _cells(row) == shown


def test_the_readme_has_the_ranks_that_the_demo_replayed():
    replay = json.loads((REPOSITORY / "benchmarks/results/demo/hstu/summary.json").read_text())["replay"]
    # A step takes as long as its slowest rank.
    as_loaded, balanced = (sum(map(max, replay[name])) for name in ("as loaded", "refined"))
    assert _cells("HSTU, 8 ranks") == [
        f"{as_loaded:.1f} s",
        f"{balanced:.1f} s",
        f"{as_loaded / balanced:.2f}×",
    ]


def _cells(row: str) -> list[str]:
    """The cells of a row of the README's table, without the first."""
    [line] = (line for line in PAGES["README.md"].splitlines() if line.startswith(f"| {row}"))
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


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
