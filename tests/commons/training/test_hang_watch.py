"""A stalled rank reports its stacks, even while no Python code runs."""

import ctypes
import time
from pathlib import Path

from commons.training.hang_watch import HangWatch


def _keep_the_gil(log_dir: str) -> str:
    with HangWatch(log_dir, 0.5) as watch:
        watch.begins("step 1")
        ctypes.PyDLL(None).usleep(1_000_000)  # unlike those of a CDLL, its calls keep the GIL
    return (Path(log_dir) / "stacks" / "rank0.txt").read_text()


def test_the_stack_of_a_call_that_keeps_the_gil_is_written(pools, tmp_path):
    text = pools(1).run(_keep_the_gil, str(tmp_path))[0]
    assert text.startswith("Timeout") and "in _keep_the_gil" in text


def _linger(log_dir: str) -> list[str]:
    """Returns the report of a hang."""
    said: list[str] = []
    with HangWatch(log_dir, 0.2) as watch:
        watch._say = said.append
        watch.begins("step 1")
        deadline = time.monotonic() + 20.0
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            if said:
                watch.begins("step 2")
    return said


def test_a_hang_without_a_file_is_reported_and_training_goes_on(pools, tmp_path):
    (tmp_path / "stacks").write_text("a file, not a folder")
    hang, goes_on = pools(1).run(_linger, str(tmp_path))[0]
    assert hang.startswith("has been in step 1 for more than 0.2 s, now in _linger (")
    assert "stacks" not in hang and goes_on.startswith("goes on: step 1 took")


def _come_on(log_dir: str) -> bool:
    with HangWatch(log_dir, 1.0) as watch:
        for step in range(12):
            watch.begins(f"step {step}")
            time.sleep(0.1)
    return (Path(log_dir) / "stacks" / "rank0.txt").exists()


def test_steps_that_together_exceed_the_limit_are_no_hang(pools, tmp_path):
    assert pools(1).run(_come_on, str(tmp_path)) == [False]
