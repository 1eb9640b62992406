"""What a rank reports that does not come on, though no Python runs."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from pathlib import Path

from commons.training.hang_watch import HangWatch


def _keep_the_gil(log_dir: str) -> str:
    with HangWatch(log_dir, 1.0) as watch:
        watch.begins("step 1")
        time.sleep(0.4)  # by then the timer in C is armed, and the limit is not over
        ctypes.PyDLL(None).usleep(2_000_000)  # unlike those of a CDLL, its calls keep the GIL
    return (Path(log_dir) / "stacks" / "rank0.txt").read_text()


def test_the_stack_of_a_call_that_keeps_the_gil_is_written(pools, tmp_path):
    text = pools(1).run(partial(_keep_the_gil, str(tmp_path)))[0]
    assert text.startswith("Timeout") and "_keep_the_gil" in text


def _linger_without_a_folder(log_dir: str) -> list[str]:
    """What is said about a hang where no file can be written."""
    said: list[str] = []
    with HangWatch(log_dir, 0.2) as watch:
        watch._say = said.append
        watch.begins("step 1")
        deadline = time.monotonic() + 20.0
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    return said


def test_where_no_file_can_be_written_a_hang_is_said_and_training_goes_on(pools, tmp_path):
    (tmp_path / "stacks").write_text("a file, and no folder")
    (line,) = pools(1).run(partial(_linger_without_a_folder, str(tmp_path)))[0]
    assert line.startswith("has been in step 1 for more than 0.2 s, now in _linger_without_a_folder")


def _come_on(log_dir: str) -> bool:
    with HangWatch(log_dir, 1.0) as watch:
        for step in range(12):
            watch.begins(f"step {step}")
            time.sleep(0.1)
    return (Path(log_dir) / "stacks" / "rank0.txt").exists()


def test_steps_that_are_together_longer_than_the_limit_are_no_hang(pools, tmp_path):
    assert pools(1).run(partial(_come_on, str(tmp_path))) == [False]
