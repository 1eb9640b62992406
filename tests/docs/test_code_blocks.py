"""Every code block of the pages runs, or is checked as far as it can be without training."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commons.advisor.command_line import parser as advisor_parser
from commons.perf_model import MeasuredCost
from tests.docs.gin_checks import (
    ENTRY_POINTS,
    in_folder,
    problem_of_command,
    problems_of_gin_text,
)
from tests.docs.messages import is_in_code
from tests.docs.pages import PAGES, REPOSITORY, blocks, blocks_of, commands
from tests.docs.python_blocks import run_page
from tests.process_pool import ProcessPool

CHECKED_LANGUAGES = {"python", "gin", "bash", "text"}
# What the blocks of a page need and do not define: modules of `tests.docs.preludes`.
PRELUDES = {"README.md": "readme"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_checked(page):
    for block in blocks_of(page):
        assert block.language in CHECKED_LANGUAGES, f"{block.where} is {block.language!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.page == page for b in blocks("python"))])
def test_python_blocks_run_on_two_ranks(pools, page):
    of_page = [block for block in blocks("python") if block.page == page]
    for problem in pools(2).run(run_page, PRELUDES.get(page), of_page):
        assert not problem, problem


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[str], ProcessPool]]:
    """A process for each model, because their gin configurables have the same names."""
    made: dict[str, ProcessPool] = {}
    yield lambda model: made.setdefault(model, ProcessPool(1))
    for process in made.values():
        process.close()


@pytest.mark.parametrize("block", blocks("gin"), ids=lambda block: block.where)
def test_gin_blocks_are_valid_settings(processes, block, tmp_path):
    MeasuredCost(1e-3, 0.0, 1e-6, 1e-9).save(tmp_path / "cost.json")
    problems = []
    for model in ("sid_gr", "hstu"):
        [of_model] = processes(model).run(in_folder, tmp_path, problems_of_gin_text, model, block.code)
        if not of_model:
            return
        problems += of_model
    raise AssertionError(f"{block.where} fits no model's configuration:\n" + "\n".join(problems))


COMMANDS = [(block, words) for block in blocks("bash") for words in commands(block)]


@pytest.mark.parametrize(
    ("block", "words"), COMMANDS, ids=[f"{block.where} {words[0]}" for block, words in COMMANDS]
)
def test_commands_are_ones_that_there_are(processes, block, words):
    first, *arguments = words
    check = {
        "make": _check_make,
        "torchrun": lambda words: _check_torchrun(words, processes),
        "python": _check_python,
        "pip": _check_pip,
        "git": lambda words: None,  # of the outside world
        "source": lambda words: _check_equal(words, [".venv/bin/activate"]),
        "balance-advisor": lambda words: advisor_parser().parse_args(words),
        "tensorboard": lambda words: _check_equal(words[:1], ["--logdir"]),
        "nsys": lambda words: _check_equal(words[-2:], ["torchrun", "…"]),
        ".venv/bin/ruff": lambda words: _check_equal(words[0] in ("check", "format"), True),
        ".venv/bin/mypy": lambda words: _check_equal(words, []),
        ".venv/bin/python": _check_python,
    }.get(first)
    assert check is not None, f"{block.where}: nothing checks a command {first!r}"
    check(arguments)


def _check_equal(got, expected) -> None:
    assert got == expected


def _check_make(words: list[str]) -> None:
    """Targets are there, and variables are among those that the Makefile says it takes."""
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    for word in words:
        name = word.partition("=")[0]
        assert "=" not in word or re.search(rf"^# {name}  ", makefile, re.MULTILINE), word
    assert targets
    made = subprocess.run(["make", "-n", *targets], cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def _check_pip(words: list[str]) -> None:
    """Extras are in pyproject.toml, and pinned versions are those that the tests run on."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pins = (REPOSITORY / "ci" / "constraints.txt").read_text().replace("fbgemm_gpu-cpu", "fbgemm-gpu").split()
    assert words[0] == "install"
    for word in words[1:]:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            assert set(extra.split(",")) <= project["optional-dependencies"].keys()
        if "==" in word:
            assert word in pins, word


def _check_python(words: list[str]) -> None:
    """The module or the file is there, and the flags are in its source."""
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
    for flag in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in source, f"{path} has no {flag}"


def _source_of(module: str) -> Path | None:
    path = REPOSITORY / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__main__.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _check_torchrun(words: list[str], processes: Callable[[str], ProcessPool]) -> None:
    """Torchrun takes the flags; an entry point takes its own, and comes to where its training begins."""
    if words == ["…"]:
        return
    options = 0
    while words[options].startswith("--"):  # of torchrun; they have a value each
        options += 1 if "=" in words[options] or words[options] == "--standalone" else 2
    from torch.distributed.run import get_args_parser

    script = ["-m", words[options + 1]] if words[options] == "-m" else [words[options]]
    get_args_parser().parse_args([*words[:options], *script])
    if words[options] != "-m":
        _check_python(words[options:])
        return
    module, arguments = words[options + 1], words[options + 2 :]
    if module not in ENTRY_POINTS:
        _check_python(words[options:])
        return
    config = arguments[arguments.index("--gin-config-file") + 1]
    assert (REPOSITORY / config).exists(), config
    [problem] = processes(ENTRY_POINTS[module]).run(problem_of_command, module, arguments)
    assert not problem, f"{module} {' '.join(arguments)}\n{problem}"


# Another test compares it with what its command prints.
_ADVICE = "Data    lengths.npy"
PRINTED = [block for block in blocks("text") if not block.code.startswith(_ADVICE)]


@pytest.mark.parametrize("block", PRINTED, ids=lambda block: block.where)
def test_what_is_said_to_be_printed_is_in_the_code(block):
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
    """The names of a page's headings, as they are made on GitHub."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Files with the fields that gin files set, and the configurables of each that are of the page.
_ARGS = (
    "commons/training/training_args.py",
    "commons/training/network_args.py",
    "commons/datasets/benchmark_args.py",
    "commons/datasets/embedding_args.py",
    "commons/datasets/random_distribution.py",
    "hstu/training/model_args.py",
    "sid_gr/training/model_args.py",
)


@pytest.mark.parametrize("path", _ARGS)
def test_every_setting_is_on_the_page_for_those_who_come_with_gin_files(path):
    page = PAGES["docs/coming-from-recsys-examples.md"]
    for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
        if isinstance(node, ast.ClassDef):
            assert re.search(rf"\b{node.name.removeprefix('Base')}\b", page), node.name
            for field in (line.target.id for line in node.body if isinstance(line, ast.AnnAssign)):
                assert f"`{field}`" in page or field.startswith("balance_") or f".{field}`" in page, field


@pytest.mark.parametrize("package", ["sequence_batch", "partition", "distributed", "pipeline"])
def test_every_file_of_the_core_has_its_place_on_the_page(package):
    for path in (REPOSITORY / "commons" / package).glob("[!_]*.py"):
        assert f"`{path.name}`" in PAGES["docs/how-it-works.md"], path
