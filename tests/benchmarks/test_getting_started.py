"""The page shows what its own commands print."""

import shlex

from benchmarks.getting_started import BINDINGS, COMMAND, ON
from benchmarks.harness import read_result
from tests.docs.pages import blocks


def test_the_pages_commands_are_those_that_are_measured():
    trainings = [
        shlex.split(command)
        for block in blocks("bash")
        if block.page == "docs/getting-started.md"
        for command in block.code.replace("\\\n", " ").splitlines()
        if command.startswith("torchrun")
    ]
    without, balanced = ([word for word in words if "log_dir" not in word] for words in trainings)
    launch = ["torchrun", "--nproc_per_node", "2", *COMMAND.split()]
    assert without == [*launch, "--gin-bindings", *BINDINGS.split()]
    assert balanced == [*without, ON]


def test_what_is_shown_is_a_gain_with_the_same_loss():
    figures = read_result("getting_started")
    losses = {line.split("loss ")[1].split()[0] for lines in figures["lines"].values() for line in lines}
    assert len(losses) == 1
    speeds = figures["samples_per_second"]
    assert all(on > off for off, on in zip(speeds["off"], speeds["on"], strict=True))
