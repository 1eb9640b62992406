"""Two runs never write to the same folder at the same time."""

import os
import signal
from multiprocessing.connection import Connection
from unittest import mock

import pytest

from commons.training import run_lock
from tests.commons.distributed.errors_and_warnings import error_of_all
from tests.commons.training.small_task import small_run
from tests.process_pool import forkserver, free_port


def _hold(port: int, connection: Connection, folders: dict[str, str], fork: bool) -> None:
    """A run of one rank that holds its folders until it is killed."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    with run_lock.locked(folders):
        child = os.fork() if fork else None
        if child != 0:
            connection.send(child)
        signal.pause()


@pytest.fixture
def other_run():
    """Starts another run that writes to folders, and returns its process and the child that it forked."""
    started = []

    def start(folders: dict[str, str], fork: bool = False):
        ours, theirs = forkserver.Pipe()
        process = forkserver.Process(target=_hold, args=(free_port(), theirs, folders, fork))
        process.start()
        started.append((process, child := ours.recv()))
        return process, child

    yield start
    for process, child in started:
        process.kill()
        process.join()
        if child is not None:
            os.kill(child, signal.SIGKILL)


def _run(folder: str, wait: float = 5.0) -> list[int]:
    """Returns the steps of a run on rank 0, which waits so many seconds for the folders of another."""
    settings = {"max_train_iters": 2, "ckpt_save_interval": 2, "ckpt_save_dir": f"{folder}/checkpoints"}
    with mock.patch.object(run_lock, "_WAIT_S", wait):
        return [step for step, _ in small_run(f"{folder}/logs", enable_balanced_shuffler=True, **settings)[0]]


@pytest.mark.parametrize("setting", ["log_dir", "ckpt_save_dir"])
def test_the_second_run_in_a_folder_stops_on_all_ranks(pools, tmp_path, other_run, setting):
    folder = tmp_path / {"log_dir": "logs", "ckpt_save_dir": "checkpoints"}[setting]
    process, _ = other_run({f"TrainerArgs.{setting}": str(folder)})
    expected = f"RuntimeError: TrainerArgs.{setting} = '{folder}': another run writes to this folder"
    assert pools(2).run(error_of_all, _run, str(tmp_path), 0.0)[0].startswith(expected)
    assert sorted(path.name for path in folder.iterdir()) == [".lock"]
    process.kill()
    process.join()
    assert pools(2).run(_run, str(tmp_path))[0] == [1, 2]


def test_a_child_of_a_killed_run_does_not_hold_its_folders(pools, tmp_path, other_run):
    process, child = other_run({"TrainerArgs.log_dir": f"{tmp_path}/logs"}, fork=True)
    process.kill()
    process.join()
    os.kill(child, 0)  # is alive
    assert pools(2).run(_run, str(tmp_path))[0] == [1, 2]


def test_a_folder_that_cannot_be_written_to_is_named_with_its_setting(pools, tmp_path):
    (tmp_path / "file").write_text("")
    expected = f"OSError: TrainerArgs.log_dir = '{tmp_path}/file/logs' cannot be written to"
    assert pools(2).run(error_of_all, _run, f"{tmp_path}/file")[0].startswith(expected)
