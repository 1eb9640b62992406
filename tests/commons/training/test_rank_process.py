"""A rank's process joins its job, or refuses to train alone by omission."""

import pytest

from tests.commons.training.internals import rank_process


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_tasks_without_torchrun_are_refused(monkeypatch, variable):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(variable, "8")
    with pytest.raises(RuntimeError, match=f"{variable} is 8.* would train alone: start one torchrun"):
        rank_process().__enter__()


def test_a_rank_of_no_world_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match="RANK is 1, and WORLD_SIZE is not set"):
        rank_process().__enter__()
