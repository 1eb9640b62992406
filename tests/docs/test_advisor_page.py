"""The output that the advisor's page shows is what its command prints."""

import re

from commons.advisor.__main__ import main
from tests.docs.pages import blocks, blocks_of, commands

PAGE = "docs/advisor.md"
# The last column is measured anew.
_PLANNING = re.compile(r"\s+([\d.]+ (µs|ms|s)|–)$")


def test_the_example_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = next(block for block in blocks("bash") if block.page == PAGE)
    (_, _, make_lengths), (_, *advise) = commands(example)
    exec(make_lengths, {})
    assert main(advise) == 0
    out = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    printed = {_PLANNING.sub("", line) for line in out.splitlines()}
    shown = next(block for block in blocks_of(PAGE) if block.language == "text").code.splitlines()
    assert len(shown) > 15
    assert [line for line in shown if line and _PLANNING.sub("", line) not in printed] == []
