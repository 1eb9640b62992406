"""Output that pages show or describe is that of the commands."""

import re
import shutil
import subprocess

from benchmarks import getting_started
from benchmarks.harness import BENCHMARKS
from tests.commons.advisor.internals import main
from tests.docs.pages import REPOSITORY, blocks, blocks_of, commands

PAGE = "docs/advisor.md"
# The last column is measured anew.
_PLANNING = re.compile(r"\s+([\d.]+ (µs|ms|s)|–)$")


def test_the_advisor_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
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


def test_make_alone_lists_every_target_and_writes_nothing(tmp_path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    made = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    listed_targets, listed_benchmarks = (
        dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", part, re.MULTILINE))
        for part in made.stdout.split("NAME=...")
    )
    assert listed_targets.keys() == targets, listed_targets
    assert listed_benchmarks.keys() == BENCHMARKS.keys()


def test_getting_started_shows_the_lines_of_its_own_commands():
    page = "docs/getting-started.md"
    trainings = [
        words
        for block in blocks("bash")
        if block.page == page
        for words in commands(block)
        if words[0] == "torchrun"
    ]
    without, balanced = ([word for word in words if "log_dir" not in word] for words in trainings)
    launch = ["torchrun", "--nproc_per_node", "2", *getting_started.COMMAND.split()]
    assert without == [*launch, "--gin-bindings", *getting_started.BINDINGS.split()]
    assert balanced == [*without, getting_started.ON]
