"""The programs under torchrun, as users start them."""

from __future__ import annotations

import re

import pytest

from tests.e2e.torchrun import torchrun
from tests.examples.programs import FOLDER, PROGRAMS, rows_of, trained_alone


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_losses_of_a_single_process(tmp_path, name):
    output = torchrun(tmp_path, FOLDER / f"{name}.py")
    losses, _ = trained_alone(name, rows_of(name, [5, 2]))
    printed = re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)
    assert list(map(float, printed)) == pytest.approx(losses, abs=1e-4), output
