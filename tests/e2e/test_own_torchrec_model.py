from __future__ import annotations

import re

from tests.e2e.torchrun import REPOSITORY, torchrun

EXAMPLE = REPOSITORY / "examples/own_torchrec_model.py"
LINE = re.compile(r"^loss ([\d.]+)  imbalance ([\d.]+) → ([\d.]+)$", re.MULTILINE)


def test_example_trains_and_balances(tmp_path):
    output = torchrun(tmp_path, EXAMPLE)
    steps = [tuple(map(float, step)) for step in LINE.findall(output)]
    assert len(steps) == 10, output
    assert len(output.splitlines()) == len(steps), f"more than the figures was printed:\n{output}"
    losses, before, after = zip(*steps, strict=True)
    assert losses[-1] < losses[0]
    assert sum(after) < sum(before) - 1


def test_example_stays_short():
    assert len(EXAMPLE.read_text().splitlines()) < 80
