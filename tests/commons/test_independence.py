"""The library does not depend on any model."""

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


def imported(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add(str(node.module).partition(".")[0])
    return packages


@pytest.mark.parametrize("package", [*CORE, "perf_model", "datasets"])
def test_the_core_imports_no_feature(package):
    for path in (COMMONS / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
            assert "features" not in {part for name in (*names, module) for part in name.split(".")}, path


@pytest.mark.parametrize("package", CORE)
def test_the_core_looks_no_feature_up(package):
    """Only the settings' table of what features took over names their packages."""
    names = "|".join(path.parent.name for path in COMMONS.glob("features/*/__init__.py"))
    for path in (COMMONS / package).glob("*.py"):
        found = re.findall(rf"""["'](?:{names})["']""", path.read_text())
        assert not found or path.name == "shuffler_settings.py" or package == "partition", (path, found)


@pytest.mark.parametrize("package", CORE)
def test_tests_of_the_core_import_no_feature(package):
    for path in (REPOSITORY / "tests/commons" / package).glob("*.py"):
        assert not re.search(r"^ *(?:from|import) commons\.features", path.read_text(), re.MULTILINE), path


def test_no_feature_imports_another():
    features = {path.name for path in (COMMONS / "features").iterdir() if (path / "__init__.py").exists()}
    assert "controller" in features
    for feature in features:
        for path in (COMMONS / "features" / feature).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level > 1:
                    others = {"features", *features} if node.level == 3 else features
                    assert str(node.module).partition(".")[0] not in others, path


def test_the_library_imports_no_model():
    files = list(COMMONS.rglob("*.py"))
    assert len(files) > 50
    for path in files:
        assert imported(path).isdisjoint({"hstu", "sid_gr"}), path


def without_extras(program: str) -> subprocess.CompletedProcess:
    """Runs a program without the packages that only trainer and datasets need."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('gin', 'polars', 'tensorboard')))"
    return subprocess.run(
        [sys.executable, "-c", f"{missing}\n{program}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_core_needs_no_extra():
    packages = ", ".join(f"commons.{package}" for package in (*CORE, "perf_model"))
    result = without_extras(f"import {packages}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", CORE)
def test_the_core_names_no_model(package):
    for path in (COMMONS / package).glob("*.py"):
        assert not re.search(r"hstu|\bsid(?!es?\b)|semantic", path.read_text(), re.IGNORECASE), path


def test_models_do_not_import_each_other():
    for model, other in (("hstu", "sid_gr"), ("sid_gr", "hstu")):
        for path in (REPOSITORY / model).rglob("*.py"):
            assert other not in imported(path), path
