"""A stalled rank reports its stacks, even while no Python code runs."""

import ctypes
import time

from tests.commons.training.internals import HangWatch
from tests.on_ranks import on_ranks


@on_ranks(1)
def test_the_stack_of_a_call_that_keeps_the_gil_is_written(tmp_path):
    with HangWatch(str(tmp_path), 0.5) as watch:
        watch.begins("step 1")
        ctypes.PyDLL(None).usleep(1_000_000)  # unlike those of a CDLL, its calls keep the GIL
    text = (tmp_path / "stacks/rank0.txt").read_text()
    assert text.startswith("Timeout") and "in test_the_stack_of_a_call" in text


@on_ranks(1)
def test_a_hang_without_a_file_is_reported_and_training_goes_on(tmp_path):
    (tmp_path / "stacks").write_text("a file, not a folder")
    said: list[str] = []
    with HangWatch(str(tmp_path), 0.2) as watch:
        watch._say = said.append
        watch.begins("step 1")
        deadline = time.monotonic() + 20.0
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            if said:
                watch.begins("step 2")
    hang, goes_on = said
    assert hang.startswith("has been in step 1 for more than 0.2 s, now in test_a_hang_without_a_file")
    assert "stacks" not in hang and goes_on.startswith("goes on: step 1 took")


@on_ranks(1)
def test_steps_that_together_exceed_the_limit_are_no_hang(tmp_path):
    with HangWatch(str(tmp_path), 1.0) as watch:
        for step in range(12):
            watch.begins(f"step {step}")
            time.sleep(0.1)
    assert not (tmp_path / "stacks/rank0.txt").exists()
