"""A loader that fills a batch's memory again, before the batch was copied, is noticed on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.loaded_memory import LoadedBatch
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.rows import Rows
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of

BATCHES = 12
REFILLED, FINE = ("in place", "as an array", "same object"), ("again", "in turns")


@dataclasses.dataclass(eq=False)
class Scored(BaseBatch):
    """A batch with a score per row."""

    scores: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))


def _batch(seed: int) -> Scored:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, (6,), generator=generator)
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([1, 2, 3]))
    return Scored(features, 3, {}, scores=torch.rand(3, 4, generator=generator))


def _loader(how: str) -> Iterator[Scored]:
    """Batches of which only those of rank 1 are refilled; `in turns` in as many as may be loaded."""
    batches = [_batch(100 * dist.get_rank())]
    if how == "in turns":
        batches = [_batch(number) for number in range(2)]
    for number in range(BATCHES):
        batch, fresh = batches[number % len(batches)], _batch(1000 + number)
        if dist.get_rank() == 1 and how in ("in place", "in turns"):
            batch.scores.copy_(fresh.scores)
        elif dist.get_rank() == 1 and how == "as an array":
            batch.features.values().numpy()[:] = fresh.features.values().numpy()
        elif dist.get_rank() == 1 and how == "same object":
            batch.features = fresh.features
        yield batch


class _Tokens(FieldShuffler):
    def get_workloads(self, batch: Scored) -> torch.Tensor:
        return batch.num_tokens()


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, batch: Scored) -> tuple[torch.Tensor, None]:
        return (batch.scores @ self.weight)[: batch.num_samples], None


def _train(how: str, own_loop: bool) -> tuple[int, str]:
    """Steps of a loader, and the error that ended them."""
    shuffler, steps = _Tokens(), 0

    def loop() -> None:
        nonlocal steps
        if own_loop:
            for batch, plan in shuffler.plan_ahead(_loader(how)):
                shuffler.exchange(batch, plan)
                shuffler.scale(torch.zeros(()), plan, None)
                steps += 1
            return
        model = _Model()
        pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.1), shuffler)
        for _ in steps_of(pipeline, _loader(how)):
            steps += 1

    error = error_of(loop)
    return steps, error


@pytest.mark.parametrize("own_loop", [False, True])
def test_refilled_memory_ends_all_ranks(pools, own_loop):
    for how in REFILLED:
        for rank, (steps, error) in enumerate(pools(2).run(_train, how, own_loop)):
            assert steps == 1  # which runs on wrong data
            field = "features.values()" if how != "in place" else "scores"
            assert error.startswith(f"ValueError: {field} of a batch changed after the loader gave it")
            assert rank == 1 or "raised on rank 1" in error


@pytest.mark.parametrize("own_loop", [False, True])
def test_memory_that_does_not_change_too_early_is_fine(pools, own_loop):
    for how in FINE:
        assert pools(2).run(_train, how, own_loop) == [(BATCHES, "no error")] * 2


def test_equal_contents_are_fine_whatever_holds_them():
    batch = _batch(0)
    loaded = LoadedBatch(Rows(batch))
    for _ in range(3):
        batch.scores.copy_(_batch(0).scores)
        batch.features = _batch(0).features
        loaded.check_unchanged(LoadedBatch(Rows(batch)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (1000, 7)])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_kind_of_tensor_is_looked_at(dtype, shape, transposed):
    tensor = torch.zeros(shape, dtype=dtype)
    if transposed:
        tensor = tensor.t().contiguous().t()
    rows = {"rows": tensor, "none": torch.zeros(shape[0], 0)}
    loaded = LoadedBatch(Rows(rows))
    loaded.check_unchanged(LoadedBatch(Rows({"rows": tensor.clone()})))
    rows["rows"][-1] = 1
    with pytest.raises(ValueError, match="rows of a batch changed"):
        loaded.check_unchanged(LoadedBatch(Rows({"rows": tensor.clone()})))


def test_a_container_that_gets_other_tensors_is_noticed():
    for make in (dict, lambda values: [*values.values()]):
        inner = make({"ids": torch.arange(3)})
        loaded = LoadedBatch(Rows((inner, torch.zeros(3))))
        inner["ids" if isinstance(inner, dict) else 0] = torch.arange(3) + 10
        with pytest.raises(ValueError, match="of a batch changed after the loader gave it"):
            loaded.check_unchanged(LoadedBatch(Rows((inner, torch.ones(3)))))


class _FailsOnce:
    """Fails in place of its second batch; fills the memory of the fourth again for the fifth."""

    def __init__(self) -> None:
        self._number, self._batch = 0, _batch(4)

    def __iter__(self) -> Iterator[Scored]:
        return self

    def __next__(self) -> Scored:
        self._number += 1
        if self._number == 2:
            raise ValueError("no file")
        if self._number < 4:
            return _batch(self._number)
        self._batch.scores.fill_(self._number)
        return self._batch


def test_memory_is_looked_at_after_an_error_of_the_loader_too():
    model = _Model()
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.1), _Tokens())
    loader = _FailsOnce()
    errors = [error_of(lambda: pipeline.progress(loader)) for _ in range(5)]
    assert errors[:2] == ["no error", "ValueError: no file"]
    assert any("scores of a batch changed" in error for error in errors[2:]), errors
