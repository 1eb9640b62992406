"""A rank that is stuck is named, with what it is stuck in, and what the others wait in for it."""

from __future__ import annotations

import json

from tests.e2e.gin_files import RANDOM_DATA
from tests.e2e.torchrun import torchrun

SETTINGS = """
TrainerArgs.hang_timeout_s = 2
TrainerArgs.enable_balanced_shuffler = True
"""


def test_a_stuck_rank_and_those_that_wait_for_it_write_their_stacks_and_go_on(tmp_path):
    config = tmp_path / "config.gin"
    config.write_text(RANDOM_DATA + SETTINGS)
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", config, "stuck")
    stuck, waits = ((tmp_path / f"logs/stacks/rank{rank}.txt").read_text() for rank in (1, 0))
    assert "in linger" in stuck
    assert "in linger" not in waits and "in all_to_all_single" in waits
    assert "rank 1 has been in step 3 for more than 2 s, now in linger (tests/e2e/failing_rank.py:" in output
    assert "rank 0 has been in step 3 for more than 2 s" in output
    assert "rank 1 goes on: step 3 took" in output
    log = [json.loads(line) for line in (tmp_path / "logs/train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
