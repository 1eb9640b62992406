"""Loops and loaders of other libraries train as one process does, where these libraries are installed."""

from pathlib import Path

import pytest

from tests.e2e.torchrun import torchrun


@pytest.mark.parametrize(
    ("name", "package"),
    [("accelerate", "accelerate"), ("lightning", "lightning"), ("stateful_loader", "torchdata")],
)
def test_loops_of_other_libraries(tmp_path, name, package):
    pytest.importorskip(package, reason=f"needs {package}, which nothing else here does")
    torchrun(tmp_path, Path(__file__).with_name("foreign_loops.py"), name, fresh=True)
