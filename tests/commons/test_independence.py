"""Imports point one way, and the library does not depend on any model."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
COMMONS = REPOSITORY / "commons"
# Packages of batch, plan, exchange and pipeline. Datasets and cost models belong to some model.
CORE = ("sequence_batch", "partition", "distributed", "pipeline")
EXTENSIONS = [path.parent.name for path in COMMONS.glob("extensions/*/__init__.py")]
FOR_SEVERAL = ("row_objects", "more_kinds")  # files beside the folders of extensions
OF_OTHERS = {"controller": ("sample_groups",)}  # extensions that an extension may import
IN_THE_WHEEL = ("*.py", "extensions/**/*.py", *(f"{name}/*.py" for name in (*CORE, "perf_model", "advisor")))
# Files, and a pattern of what they must not import.
RULES = [
    *((f"commons/{package}/*.py", r"commons\.extensions") for package in (*CORE, "perf_model")),
    *((f"tests/commons/{package}/*.py", r"commons\.extensions") for package in CORE),
    *(
        (
            f"commons/extensions/{name}/*.py",
            rf"commons\.extensions\.(?!({'|'.join((name, *FOR_SEVERAL, *OF_OTHERS.get(name, ())))})\b)",
        )
        for name in EXTENSIONS
    ),
    *((f"commons/extensions/{name}.py", r"commons\.extensions\.") for name in FOR_SEVERAL),
    ("commons/datasets/*.py", r"commons\.extensions"),
    ("commons/bucket_sampler.py", r"commons\.extensions(?!\.sample_groups\b)"),
    # The advisor reads gin files in a checkout.
    *(
        (f"commons/{path}", r"commons\.(datasets|unbounded_ids|training(?!\.advisor_gin\b))")
        for path in IN_THE_WHEEL
    ),
    ("commons/**/*.py", "hstu|sid_gr"),
    ("hstu/**/*.py", "sid_gr"),
    ("sid_gr/**/*.py", "hstu"),
]


def imported(path: Path) -> set[str]:
    """Returns the full names of modules and of names in modules that a file imports."""
    package = path.relative_to(REPOSITORY).with_suffix("").parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: -node.level] if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(("files", "others"), RULES)
def test_imports_point_one_way(files, others):
    paths = list(REPOSITORY.glob(files))
    assert paths
    for path in paths:
        assert not [name for name in imported(path) if re.match(rf"(?:{others})\b", name)], path


@pytest.mark.parametrize("package", CORE)
def test_the_core_looks_no_extension_up_and_names_no_model(package):
    for path in (COMMONS / package).glob("*.py"):
        found = set(re.findall(rf"""["']({"|".join(EXTENSIONS)})["']""", path.read_text()))
        # Models read `batch.pieces`, an attribute of every `BaseBatch`.
        assert not found - ({"pieces"} if path.name == "base_batch.py" else set()), (path, found)
        assert not re.search(r"hstu|\bsid(?!es?\b)|semantic", path.read_text(), re.IGNORECASE), path


def test_files_of_the_core_import_each_other_in_no_circle():
    """Imports for types alone, and those within functions, count, too."""
    files = {path: imported(path) for package in CORE for path in (COMMONS / package).glob("*.py")}
    names = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in files}
    left = {path: {names[name] for name in found if name in names} for path, found in files.items()}
    while leaves := [path for path, others in left.items() if not others & left.keys()]:
        left = {path: others for path, others in left.items() if path not in leaves}
    assert not left, sorted(path.name for path in left)


def test_the_core_needs_no_extra():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('gin', 'polars', 'tensorboard')))\n"
        f"import {', '.join(f'commons.{package}' for package in (*CORE, 'perf_model'))}"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
