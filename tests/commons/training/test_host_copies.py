"""Copies of a training state on the host, and the checkpoints that are written from them."""

from typing import Any

import pytest
import torch

from commons.training import OptimizerArgs, shard_model
from tests.commons.training.internals import Checkpoints, HostCopies, TrainingState
from tests.commons.training.small_task import CPU
from tests.hstu.hstu_samples import ranking_model
from tests.on_ranks import on_ranks


def _tensors(state: Any) -> list[torch.Tensor]:
    """The tensors in a state, in order."""
    if isinstance(state, dict):
        return [tensor for part in state.values() for tensor in _tensors(part)]
    if isinstance(state, list | tuple):
        return [tensor for part in state for tensor in _tensors(part)]
    return [state] if isinstance(state, torch.Tensor) else []


def _places(state: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in _tensors(state) if tensor.numel()]


def _state() -> dict[str, Any]:
    matrix = torch.randn(6, 4)
    return {
        "step": 3,
        "nested": [{"matrix": matrix, "strided": matrix.T, "part": matrix[1:3]}, (torch.tensor(7), None)],
        "empty": torch.zeros(0, 5),
        "bits": torch.tensor([True, False]),
    }


def _check_copied(copied: Any, state: Any) -> None:
    assert len(_tensors(copied)) == len(_tensors(state))
    for got, expected in zip(_tensors(copied), _tensors(state), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
        assert got.untyped_storage().nbytes() == got.numel() * got.element_size()  # as much is written
    assert not set(_places(copied)) & set(_places(state))


def test_a_copy_takes_the_memory_of_the_one_before():
    copies, state = HostCopies(), _state()
    copied = copies.copy(state)
    _check_copied(copied, state)
    places, old = _places(copied), [tensor.clone() for tensor in _tensors(copied)]
    state["nested"][0]["matrix"].mul_(2)  # training goes on
    assert all(map(torch.equal, _tensors(copied), old))
    copied = copies.copy(state)
    _check_copied(copied, state)
    assert _places(copied) == places
    # Tensors of another kind get memory of their own.
    state = {"step": torch.ones(2), "empty": torch.zeros(0, 5), "bits": torch.ones(3)}
    copied = copies.copy(state)
    _check_copied(copied, state)
    places = _places(copied)
    assert _places(copies.copy(state)) == places


@on_ranks(2)
def test_a_second_checkpoint_takes_no_memory_and_waits_for_the_first(tmp_path):
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("adam", 0.1), CPU)
    optimizer.init_state()
    state, checkpoints = TrainingState(model, optimizer), Checkpoints(tmp_path)
    places = []
    for step in (1, 2):
        checkpoints.save(step, state.to_save())
        places.append(_places(list(checkpoints._copies.tensors.values())))
        if step == 1:
            checkpoints.finish()
    assert places[0] == places[1] and places[0]
    with pytest.raises(
        RuntimeError, match=r"^save of step 3 before the last checkpoint, to .*, was finished"
    ):
        checkpoints.save(3, state.to_save())
    checkpoints.finish()
