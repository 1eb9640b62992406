"""Patches of other trainers are well-formed, and use names that the library has.

That they fit their program is tried by hand.
"""

import ast
import importlib
import re
import runpy
import subprocess
from pathlib import Path

import polars as pl
import pytest

from tests.examples.programs import FOLDER

PATCHES = sorted((FOLDER / "patches").glob("*.patch"))
_STATEMENTS = ("class ", "def ", "import ", "from ", "@")
_HUNK = re.compile(r"^@@ .*\n((?:[-+].*\n?)+)", re.MULTILINE)


@pytest.fixture(params=PATCHES, ids=lambda path: path.name)
def patch(request) -> Path:
    return request.param


def test_hunks_have_the_lines_that_their_headers_count(patch, tmp_path):
    parsing = ["git", "apply", "--numstat", str(patch)]
    parsed = subprocess.run(parsing, cwd=tmp_path, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    assert parsed.stdout


def test_added_statements_compile(patch):
    for text in _added_statements(patch):
        compile(text, patch.name, "exec")


def test_imported_names_exist(patch):
    imports = [
        node
        for text in _added_statements(patch)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    for node in imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                _import_ours(alias.name)
        elif node.module is not None and (module := _import_ours(node.module)) is not None:
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_every_patch_of_a_stage_has_a_shuffler():
    with_stage = [path for path in PATCHES if "workload_balancer" in "".join(_added_statements(path))]
    assert len(with_stage) == 4
    for path in with_stage:
        classes = [
            node
            for text in _added_statements(path)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef)
        ]
        methods = {each.name for node in classes for each in node.body if isinstance(each, ast.FunctionDef)}
        assert "get_workloads" in methods, path


def test_the_data_of_mlperf_have_the_files_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_DATA_PATH", str(tmp_path))
    runpy.run_path(str(FOLDER / "patches" / "mlperf_hstu_data.py"))
    sessions = pl.read_parquet(tmp_path / "processed_5b" / "train_sessions.parquet")
    assert len(sessions) == sessions["uid"].n_unique() > 100
    assert (sessions["timestamps"].list.len() == sessions["item_ids"].list.len()).all()
    for name in ("artist", "album"):
        assert len(pl.read_parquet(tmp_path / "shared_metadata" / f"{name}_item_mapping.parquet"))


def _added_statements(patch: Path) -> list[str]:
    """Returns the added lines of each hunk that adds whole statements at a module's level."""
    found = []
    for hunk in _HUNK.findall(patch.read_text()):
        added = [line[1:] for line in hunk.splitlines() if line.startswith("+")]
        first = next((line for line in added if line), "")
        if first.startswith(_STATEMENTS):
            found.append("\n".join(added) + "\n")
    return found


def _import_ours(name: str) -> object | None:
    """Imports a module of the library by its name in a checkout. Returns None for modules of others."""
    if name.partition(".")[0] != "workload_balancer":
        return None
    return importlib.import_module(name.replace("workload_balancer", "commons"))
