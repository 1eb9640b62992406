"""The example programs run under torchrun."""

import re

import pytest

from tests.e2e.torchrun import torchrun
from tests.examples.programs import FOLDER, PROGRAMS, in_checkout, rows_of, source, trained_alone


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_losses_of_a_single_process(tmp_path, name):
    (tmp_path / "program.py").write_text(in_checkout(source(name)))
    output = torchrun(tmp_path, "program.py")
    losses, _ = trained_alone(name, rows_of(name, [5, 2]))
    printed = re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)
    assert list(map(float, printed)) == pytest.approx(losses, abs=1e-4), output


def test_own_torchrec_model_is_short_trains_and_balances(tmp_path):
    example = FOLDER / "own_torchrec_model.py"
    assert len(example.read_text().splitlines()) < 80
    lines = torchrun(tmp_path, example, fresh=True).splitlines()
    lines = [line for line in lines if not line.startswith("compiling ")]  # shown where that takes seconds
    steps = [re.fullmatch(r"loss ([\d.]+)  imbalance ([\d.]+) → ([\d.]+)", line) for line in lines]
    assert len(steps) == 10 and all(steps), f"expected ten lines of figures and nothing else:\n{lines}"
    losses, before, after = zip(*(map(float, step.groups()) for step in steps if step), strict=True)
    assert losses[-1] < losses[0]
    assert sum(after) < sum(before) - 1
