"""The log lines on the page are those that its commands print.

With UPDATE_PAGES=1, the test writes them to the page.
"""

import os
import re

import pytest

from tests.docs.pages import PAGES, REPOSITORY, blocks, blocks_of, commands
from tests.e2e.torchrun import torchrun

PAGE = "docs/getting-started.md"
# Times and what follows from them.
_MEASURED = re.compile(r"[\d.e-]+(?= (?:samples/s|tokens/s|TFLOP/s|ms))|(?<=measured )[\d.]+")
_LOSS = re.compile(r"(?<=loss )[\d.]+")


def test_the_log_lines_are_those_of_the_commands(tmp_path):
    printed = []
    for block in blocks("bash"):
        for words in commands(block) if block.page == PAGE else []:
            if words[0] == "torchrun":
                arguments = [word.replace("'out/", f"'{tmp_path}/") for word in words[3:]]
                lines = re.split(r"[\r\n]+", torchrun(REPOSITORY, *arguments))
                printed.append(
                    next(line.strip() for line in lines if line.lstrip().startswith("step 20  loss"))
                )
    [block] = (block for block in blocks_of(PAGE) if block.language == "text")
    if os.environ.get("UPDATE_PAGES"):
        (REPOSITORY / PAGE).write_text(PAGES[PAGE].replace(block.code, "\n".join(printed) + "\n"))
        return
    shown = block.code.splitlines()
    assert len(printed) == len(shown) == 2
    for ours, theirs in zip(shown, printed, strict=True):
        assert _comparable(ours) == _comparable(theirs)
        # Processors differ in the last bits.
        assert float(_LOSS.search(ours)[0]) == pytest.approx(float(_LOSS.search(theirs)[0]), rel=1e-3)


def _comparable(line: str) -> str:
    return _LOSS.sub("…", _MEASURED.sub("…", line))
