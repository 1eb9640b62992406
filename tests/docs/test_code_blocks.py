"""Runs every code block of the pages, or checks it as far as possible without training."""

import importlib.util
import itertools
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commons.perf_model import Cost
from tests.commons.advisor.internals import parser as advisor_parser
from tests.docs.gin_checks import ENTRY_POINTS, problem_of_command, problems_of_gin_text
from tests.docs.messages import is_in_code
from tests.docs.pages import PAGES, REPOSITORY, blocks, blocks_of, commands
from tests.docs.python_blocks import run_page
from tests.process_pool import ProcessPool

CHECKED_LANGUAGES = {"python", "gin", "bash", "text", "diff"}
# Modules of `tests.docs.preludes` with names that a page's blocks use but do not define.
PRELUDES = {
    "README.md": "readme",
    "docs/own-loop.md": "own_loop",
    "docs/parallelism.md": "parallelism",
    "docs/watching-a-run.md": "watching_a_run",
    "docs/what-stays-equal.md": "what_stays_equal",
    "docs/your-own-model.md": "readme",
}


def test_every_block_is_of_a_kind_that_is_checked():
    for block in itertools.chain.from_iterable(map(blocks_of, PAGES)):
        assert block.language in CHECKED_LANGUAGES, f"{block.where} is {block.language!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.page == page for b in blocks("python"))])
def test_python_blocks_run_on_two_ranks(pools, page):
    page_blocks = [block for block in blocks("python") if block.page == page]
    for problem in pools(2).run(run_page, PRELUDES.get(page), page_blocks):
        assert not problem, problem


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[str], ProcessPool]]:
    """One process per model, because their gin configurables share names."""
    made: dict[str, ProcessPool] = {}
    yield lambda model: made.setdefault(model, ProcessPool(1))
    for process in made.values():
        process.close()


@pytest.mark.parametrize("block", blocks("gin"), ids=lambda block: block.where)
def test_gin_blocks_are_valid_settings(processes, block, tmp_path):
    Cost((1e3, 1.0, 1.0), 1e6).save(tmp_path / "cost.json")
    problems = []
    for model in ("sid_gr", "hstu"):
        [found] = processes(model).run(problems_of_gin_text, model, block.code, tmp_path)
        if not found:
            return
        problems += found
    raise AssertionError(f"{block.where} fits no model's configuration:\n" + "\n".join(problems))


COMMANDS = [(block, words) for block in blocks("bash") for words in commands(block)]


@pytest.mark.parametrize(
    ("block", "words"), COMMANDS, ids=[f"{block.where} {words[0]}" for block, words in COMMANDS]
)
def test_commands_exist_and_take_their_arguments(processes, block, words):
    first, *arguments = words
    if first == "srun":
        first, *arguments = words[words.index("torchrun") :]
    if first == "make":
        _check_make(arguments)
    elif first == "torchrun":
        _check_torchrun(arguments, processes)
    elif first in ("python", ".venv/bin/python"):
        _check_python(arguments)
    elif first == "pip":
        _check_pip(arguments)
    elif first == "balance-advisor":
        advisor_parser().parse_args(arguments)
    else:  # not ours, and only of these forms on the pages
        forms = r"git .*|source .venv/bin/activate|export \w+=.*|ulimit -n .*|tensorboard --logdir .*"
        forms += r"|nsys .* torchrun …|\.venv/bin/ruff (check|format) ?.*|\.venv/bin/mypy"
        assert re.fullmatch(forms, " ".join(words)), f"{block.where}: nothing checks this command"


def _check_make(words: list[str]) -> None:
    """Checks that targets exist and that the Makefile documents the variables."""
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    for word in words:
        name = word.partition("=")[0]
        assert "=" not in word or re.search(rf"^# {name}  ", makefile, re.MULTILINE), word
    assert targets
    made = subprocess.run(["make", "-n", *targets], cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def _check_pip(words: list[str]) -> None:
    """Checks that pyproject.toml has the extras, and that the tests run on the pinned versions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pins = (REPOSITORY / "ci" / "constraints.txt").read_text().replace("fbgemm_gpu-cpu", "fbgemm-gpu").split()
    assert words[0] == "install"
    for word in words[1:]:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            assert set(extra.split(",")) <= project["optional-dependencies"].keys()
        if "==" in word:
            assert word in pins, word


def _check_python(words: list[str]) -> None:
    """Checks that the module or file exists, and that it or what it imports beside it has the flags."""
    if words[0] == "-c":
        compile(words[1], "command line", "exec")
        return
    if words[0] == "-m":
        path = _source_of(words[1])
        if path is None:  # a tool of the environment
            assert importlib.util.find_spec(words[1]) is not None, words[1]
            return
    else:
        path = REPOSITORY / words[0]
    source = path.read_text()
    imported = re.findall(r"^from \.(\w+) import", source, re.MULTILINE)
    source += "".join(path.with_name(f"{name}.py").read_text() for name in imported)
    for flag in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in source, f"{path} has no {flag}"


def _source_of(module: str) -> Path | None:
    path = REPOSITORY / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__main__.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _check_torchrun(words: list[str], processes: Callable[[str], ProcessPool]) -> None:
    """Checks torchrun's flags, and runs an entry point up to where training begins."""
    if words == ["…"]:
        return
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words)
    module, arguments = parsed.training_script, parsed.training_script_args
    if not parsed.module or module not in ENTRY_POINTS:
        _check_python([*(["-m"] if parsed.module else []), module, *arguments])
        return
    config = arguments[arguments.index("--gin-config-file") + 1]
    assert (REPOSITORY / config).exists(), config
    [problem] = processes(ENTRY_POINTS[module]).run(problem_of_command, module, arguments)
    assert not problem, f"{module} {' '.join(arguments)}\n{problem}"


# test_shown_output.py compares this one with the command's output.
_ADVICE = "Data    lengths.npy"
PRINTED = [block for block in blocks("text") if not block.code.startswith(_ADVICE)]


def test_printed_lines_are_in_the_code():
    for block in PRINTED:
        for line in filter(None, map(str.strip, block.code.splitlines())):
            assert is_in_code(line), f"{block.where}: nothing in the code prints\n{line}"


_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, anchor in _LINK.findall(PAGES[page]):
        if target.startswith(("http:", "https:")):
            continue
        path = ((REPOSITORY / page).parent / target).resolve() if target else REPOSITORY / page
        assert path.exists(), f"{page} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor[1:] in _anchors(path.read_text()), f"{page} links to {target}{anchor}"


def _anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
