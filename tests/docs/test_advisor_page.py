"""The output that the advisor's page shows is what its command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commons.advisor.__main__ import main
from tests.docs.pages import PAGES, REPOSITORY, blocks, blocks_of, commands

PAGE = "docs/advisor.md"
# The last column is measured anew.
_PLANNING = re.compile(r"\s+([\d.]+ (µs|ms|s)|–)$")


def test_the_example_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    example = next(block for block in blocks("bash") if block.page == PAGE)
    (_, _, make_lengths), (_, *advise) = commands(example)
    exec(make_lengths, {})
    assert main(advise) == 0
    out = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    printed = {_PLANNING.sub("", line) for line in out.splitlines()}
    shown = next(block for block in blocks_of(PAGE) if block.language == "text").code.splitlines()
    assert len(shown) > 20
    assert [line for line in shown if line and _PLANNING.sub("", line) not in printed] == []


@pytest.mark.parametrize(("model", "title"), [("hstu", "for HSTU, and"), ("sid_gr", "for SID-GR,")])
def test_the_page_has_what_the_demo_predicted_and_measured(model: str, title: str):
    page = " ".join(PAGES[PAGE].split())
    [arm] = re.findall(r"the arm `(.*?)`", page)
    summary = json.loads((REPOSITORY / f"benchmarks/results/demo/{model}/summary.json").read_text())
    figures = summary["balanced"][arm]["untrimmed"]
    predicted, measured = f"{figures['speedup_predicted']:.2f} ×", f"{figures['speedup']:.2f} ×"
    shown = f"{predicted} {title} {measured}" if model == "hstu" else f"{title} {predicted} and {measured}"
    assert shown in page
