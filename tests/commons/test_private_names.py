"""Each private name of torch, TorchRec and numba that this project reads is one that they have.

A new version may rename them without notice. Other tests cover how they behave.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import commons.training
import commons.unbounded_ids

REPOSITORY = Path(__file__).parents[2]
PUBLIC = {"_asdict", "_replace"}  # methods of named tuples


def _own_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def _names_read(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in sys.stdlib_module_names:
            yield node.attr


def test_private_names_of_other_packages_exist():
    packages = [Path(commons.__file__).parent, REPOSITORY / "hstu", REPOSITORY / "sid_gr"]
    trees = [ast.parse(path.read_text()) for package in packages for path in package.rglob("*.py")]
    ours = {name for tree in trees for name in _own_names(tree)}
    read = {name for tree in trees for name in _names_read(tree) if re.match("_[^_]", name)}
    modules = [sys.modules[name] for name in [*sys.modules] if re.match(r"(torch|torchrec|numba)\b", name)]
    files = [Path(getattr(module, "__file__", None) or "") for module in modules]
    missing = read - ours - PUBLIC
    assert "_world" in missing
    for path in files:
        if missing and path.suffix == ".py" and path.exists():
            missing -= set(re.findall(r"\b_\w+", path.read_text()))
    assert not missing
