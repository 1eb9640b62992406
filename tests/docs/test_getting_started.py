"""The log lines on the page are such as its commands print; `make bench NAME=getting-started` writes them."""

import re

from tests.docs.pages import REPOSITORY, blocks, blocks_of, commands
from tests.e2e.torchrun import torchrun

PAGE = "docs/getting-started.md"


def test_the_log_lines_are_like_those_of_the_commands(tmp_path):
    printed = []
    for block in blocks("bash"):
        for words in commands(block) if block.page == PAGE else []:
            if words[0] == "torchrun":
                arguments = [word.replace("'out/", f"'{tmp_path}/") for word in words[3:]]
                arguments += [
                    "TrainerArgs.max_train_iters=2",
                    "TrainerArgs.log_interval=2",
                ]  # less than there
                lines = re.split(r"[\r\n]+", torchrun(REPOSITORY, *arguments))
                printed.append(
                    next(line.strip() for line in lines if line.lstrip().startswith("step 2  loss"))
                )
    [block] = (block for block in blocks_of(PAGE) if block.language == "text")
    shown = block.code.splitlines()
    assert len(printed) == len(shown) == 2
    assert [_without_numbers(line) for line in shown] == [_without_numbers(line) for line in printed]
    losses = [re.search(r"loss [\d.]+", line)[0] for line in (*shown, *printed)]
    assert losses[0] == losses[1] and losses[2] == losses[3]


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e+-]*", "…", line)
