"""A stalled rank reports its stacks, even while no Python code runs."""

import ctypes
import time

from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.training.internals import HangWatch
from tests.on_ranks import on_ranks


@on_ranks(1)
def test_the_stack_of_a_call_that_keeps_the_gil_is_written(tmp_path):
    with HangWatch(str(tmp_path), 0.5) as watch:
        watch.restart()
        ctypes.PyDLL(None).usleep(1_000_000)  # unlike those of a CDLL, its calls keep the GIL
    text = (tmp_path / "stacks/rank0.txt").read_text()
    assert text.startswith("Timeout") and "in test_the_stack_of_a_call" in text


@on_ranks(1)
def test_training_goes_on_without_a_file(tmp_path):
    (tmp_path / "stacks").write_text("a file, not a folder")
    with warnings_of("commons.training.hang_watch") as warnings, HangWatch(str(tmp_path), 0.1) as watch:
        watch.restart()
        time.sleep(0.3)
    assert len(warnings) == 1 and "will not be written" in warnings[0]


@on_ranks(1)
def test_steps_that_together_exceed_the_limit_are_no_hang(tmp_path):
    with HangWatch(str(tmp_path), 1.0) as watch:
        for _ in range(12):
            watch.restart()
            time.sleep(0.1)
    assert not (tmp_path / "stacks/rank0.txt").exists()
