"""A loader that fills a batch's memory again, before the batch was copied, is noticed on all ranks."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import Extension
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.internals import LoadedBatch
from tests.commons.histories import HistoryBatch, TokenShuffler, histories
from tests.commons.sequence_batch.internals import Rows
from tests.on_ranks import on_ranks

BATCHES = 20


def _batch(seed: int) -> HistoryBatch:
    return histories([1, 2, 9], np.random.default_rng(seed))


def _in_place(batch: HistoryBatch, fresh: HistoryBatch) -> None:
    batch.labels.values().copy_(fresh.labels.values())


def _as_an_array(batch: HistoryBatch, fresh: HistoryBatch) -> None:
    batch.features.values().numpy()[:] = fresh.features.values().numpy()


def _in_the_object(batch: HistoryBatch, fresh: HistoryBatch) -> None:
    batch.features = fresh.features


# How rank 1 fills a batch again, in how many batches in turn, and the field that has changed, if any does.
LOADERS: dict[str, tuple[Callable[[HistoryBatch, HistoryBatch], None], int, str]] = {
    "in place": (_in_place, 1, "labels.values()"),
    "as an array": (_as_an_array, 1, "features.values()"),
    "same object": (_in_the_object, 1, "features.values()"),
    "again": (lambda batch, fresh: None, 1, ""),
    "in turns": (_in_place, 2, ""),  # as many as may be loaded
}


def _loader(how: str) -> Iterator[HistoryBatch]:
    fill, count, _ = LOADERS[how]
    batches = [_batch(100 * dist.get_rank() + number) for number in range(count)]
    for number in range(BATCHES):
        batch = batches[number % count]
        if dist.get_rank() == 1:
            fill(batch, _batch(1000 + number))
        yield batch


@pytest.mark.parametrize("how", LOADERS)
@on_ranks(2)
def test_memory_that_changes_too_early_ends_all_ranks_and_no_other_does(how):
    field, steps = LOADERS[how][2], []
    error = error_of(steps.extend, TokenShuffler().plan_ahead(_loader(how)))
    assert len(steps) == (1 if field else BATCHES)  # the one runs on wrong data
    expected = f"ValueError: {field} of a batch changed after the loader gave it" if field else "no error"
    assert error.startswith(expected)
    assert not field or dist.get_rank() == 1 or "raised on rank 1" in error


class Verifying(Extension):
    name, order, verifies = "verifying", 0, True


@pytest.mark.parametrize("verifies", [False, True])
@on_ranks(2)
def test_batches_after_the_first_sixteen_are_watched_where_an_extension_verifies(verifies):
    def loader() -> Iterator[HistoryBatch]:
        batch = _batch(0)
        for number in range(BATCHES):
            batch = _batch(number) if number < 17 else batch
            _in_place(batch, _batch(1000 + number))
            yield batch

    shuffler = TokenShuffler(extensions=[Verifying()] if verifies else [])
    error = error_of(lambda: [*shuffler.plan_ahead(loader())])
    assert error.startswith("ValueError: labels.values() of a batch changed" if verifies else "no error")


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_kind_of_tensor_is_looked_at(dtype, transposed):
    for shape in ((5,), (5, 1), (1000, 7)):
        tensor = torch.zeros(shape, dtype=dtype)
        if transposed:
            tensor = tensor.t().contiguous().t()
        loaded = LoadedBatch(Rows({"rows": tensor, "none": torch.zeros(shape[0], 0)}))
        loaded.check_unchanged()
        tensor[-1] = 1
        with pytest.raises(ValueError, match="rows of a batch changed"):
            loaded.check_unchanged()


def test_containers_may_get_equal_tensors_and_no_others():
    batch = _batch(0)
    loaded = LoadedBatch(Rows(batch))
    for _ in range(3):
        batch.labels.values().copy_(_batch(0).labels.values())
        batch.features = _batch(0).features
        loaded.check_unchanged()
    for make in (dict, lambda values: [*values.values()]):
        inner = make({"ids": torch.arange(3)})
        loaded = LoadedBatch(Rows((inner, torch.zeros(3))))
        inner["ids" if isinstance(inner, dict) else 0] = torch.arange(3) + 10
        with pytest.raises(ValueError, match="of a batch changed after the loader gave it"):
            loaded.check_unchanged()
