"""The command works after `pip install .`, which brings numpy and numba, and names what else it needs."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.commons.advisor.command import MODEL, REPOSITORY, by_name, heavy_tailed

# Imported as Python starts, also in the process that reads a file. numba takes llvmlite along, and probes for
# packages that it works without.
SITECUSTOMIZE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        present = {"commons", "numpy", "numba", "llvmlite"} | sys.stdlib_module_names
        if package not in present or name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def advisor(
    folder: Path, *arguments: str, absent: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess:
    """Runs the command on lengths without any other package than the wheel requires."""
    np.save(folder / "lengths.npy", heavy_tailed(9000))
    (folder / "sitecustomize.py").write_text(f"ABSENT = {list(absent)}\n{SITECUSTOMIZE}")
    return subprocess.run(
        [sys.executable, "-m", "commons.advisor", *arguments],
        cwd=folder,
        env={"PYTHONPATH": f"{REPOSITORY}:{folder}", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("absent", [[], ["commons.extensions.pieces"], ["commons.extensions.padded"]])
def test_lengths_need_numpy_and_numba_alone(absent, tmp_path):
    result = advisor(tmp_path, "lengths.npy", *MODEL, "--json", absent=absent)
    assert result.returncode == 0, result.stderr
    [case] = json.loads(result.stdout)["cases"]
    assert "rebalance" in by_name(case)
    assert ("pieces" in by_name(case)) == ("commons.extensions.pieces" not in absent)
    assert (case["padded_model"] is None) == ("commons.extensions.padded" in absent)


def test_no_character_ends_a_run(tmp_path):
    result = advisor(tmp_path, "lengths.npy", *MODEL, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "\\u2192" in result.stdout and "\\xd7" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["lengths.parquet", *MODEL], "polars"),
        (["lengths.npy", *MODEL, "--html", "page.html"], "jinja2"),
        ([str(REPOSITORY / "benchmarks/demo/hstu.gin")], "gin"),
    ],
)
def test_what_needs_more_names_the_extra(arguments, package, tmp_path):
    (tmp_path / "lengths.parquet").touch()
    result = advisor(tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"balance-advisor: error: {package} is not installed")
    assert '".[advisor]"' in result.stderr and '".[train]"' in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_the_trainer_without_gin_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gin", None)
    monkeypatch.delitem(sys.modules, "commons.training", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"gin-config is not installed.*\[train\]"):
        importlib.import_module("commons.training")
