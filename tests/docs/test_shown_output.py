"""Output that pages show or describe is that of the commands and of the README's example."""

import contextlib
import io
import re
import shutil
import subprocess
import sys

import torch.distributed as dist

from benchmarks.harness import BENCHMARKS
from commons.advisor.__main__ import main
from tests.docs.pages import REPOSITORY, Block, blocks, blocks_of, commands
from tests.docs.python_blocks import run_page

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


def test_the_readme_logs_the_mean_loss_of_all_ranks(pools):
    example = [block for block in blocks("python") if block.page == "README.md"]
    (first, loss), (second, _) = pools(2).run(_logged_and_expected, example)
    assert first.startswith(f"loss {loss:.4f} ")
    assert second == ""


def _logged_and_expected(example: list[Block]) -> tuple[str, float]:
    """Returns what this rank prints, and the mean over all samples of what the prelude's model computes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        problem = run_page("readme", example)
    assert not problem, problem
    page = sys.modules["docs_page"]
    squares = (page.output.detach() - 1).square().sum()  # labels are 1
    dist.all_reduce(squares)
    return printed.getvalue(), float(squares) / page.pipeline.loss_tokens


def test_make_alone_lists_every_target_and_writes_nothing(tmp_path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    printed, *others = [
        subprocess.run(["make", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for words in ([], ["help"], ["bench"])
    ]
    assert others == [printed] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    listed_targets, listed_benchmarks = (
        dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", part, re.MULTILINE)) for part in printed.split("NAME=...")
    )
    assert listed_targets.keys() == targets, listed_targets
    assert "minutes" in listed_targets["demo"]
    assert listed_benchmarks.keys() == BENCHMARKS.keys()
