"""Each field that the library makes has memory of its own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.distributed import BatchShuffler
from tests.commons.distributed.shufflers import FieldShuffler
from tests.drawn_batches import draw_batch, sample_contents, tensors_of
from tests.on_ranks import on_ranks
from tests.own_memory import check_own_memory


@pytest.mark.parametrize("labels", ["keyed", "dense", "flat"])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@on_ranks(2)
def test_exchanged_fields_can_be_freed_or_changed_one_by_one(exchange, labels):
    shuffler, rank = FieldShuffler(exchange=exchange), dist.get_rank()
    for real in (4, 2, 0):
        rng = np.random.default_rng((rank, real))
        loaded = draw_batch(rng, 1000 * rank, 4, real if rank else 4, labels)
        before = sample_contents(loaded)
        batch = shuffler.shuffle(loaded)
        check_own_memory(batch, loaded, shuffler.padding_batch())
        features = batch.features.values().tolist()
        for tensor in tensors_of(batch)[1:]:
            if tensor.data_ptr() != batch.features.values().data_ptr():
                tensor.untyped_storage().resize_(0)
        assert batch.features.values().tolist() == features and sample_contents(loaded) == before


class DictShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch["cost"]


@on_ranks(2)
def test_a_field_in_place_or_pickled_takes_no_other_along():
    rank = dist.get_rank()
    batch = DictShuffler().shuffle(
        {
            "cost": torch.arange(8) + 8 * rank,
            "ids": torch.arange(8) * 10,
            "scores": torch.rand(8, dtype=torch.float64),
            "labels": torch.zeros(8, dtype=torch.int64),
        }
    )
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    loss = (weight * batch["scores"]).sum()
    batch["labels"] += 1
    loss.backward()
    assert weight.grad.equal(batch["scores"])
    assert batch["ids"].remainder(10).eq(0).all()
    assert len(pickle.dumps(batch["labels"])) < 600


def test_selected_rows_share_no_memory():
    loaded = draw_batch(np.random.default_rng(0), 0, 6, 5)
    check_own_memory(loaded.index_select([3, 1, 5]), loaded)
    check_own_memory(loaded.index_select([]), loaded)


@on_ranks(2)
def test_a_model_may_work_in_place_on_a_copied_row():
    shuffler = DictShuffler()
    for batch, plan in shuffler.plan_ahead([{"cost": torch.ones(1)}] * 3 if dist.get_rank() else []):
        moved = shuffler.exchange(batch, plan)
        assert moved["cost"].tolist() == [1.0]
        moved["cost"].mul_(1e30)


@on_ranks(2)
def test_batches_may_be_views_of_one_ring_of_memory():
    ring = torch.zeros(4, 3, 2)
    batches = ({"mask": ring[step % 4].fill_(step), "cost": torch.arange(3)} for step in range(12))
    planned = DictShuffler().plan_ahead(batches)
    assert [float(batch["mask"][0, 0]) for batch, _ in planned] == [*range(12)]


@pytest.mark.parametrize("enabled", [True, False])
def test_planning_ahead_leaves_memory_that_torch_may_resize(enabled):
    batch = {"cost": torch.arange(3), "ids": JaggedTensor(torch.arange(3), lengths=torch.ones(3).long())}
    for _ in DictShuffler(enabled=enabled).plan_ahead([batch]):
        assert batch["cost"].untyped_storage().resizable()
        assert batch["ids"].values().untyped_storage().resizable()


class ItemShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch["items"].lengths() ** 2


@on_ranks(2)
def test_fields_that_a_loader_cut_from_one_buffer_are_apart_after_the_exchange():
    lengths = torch.tensor([5, 4, 9]) * (1 + 2 * dist.get_rank())
    count, rows = int(lengths.sum()), len(lengths)
    buffer = torch.arange(2 * count + rows)
    items = JaggedTensor(buffer[:count], lengths=lengths)
    loaded = {
        "items": items,
        "next": JaggedTensor(buffer[1 : count + 1], lengths=lengths),  # overlaps
        "labels": items,  # the same object
        "users": buffer[2 * count :],
        "same users": buffer[2 * count :],
        "weights": torch.tensor([0.5]).expand(rows, 3),
    }
    moved = ItemShuffler().shuffle(loaded)
    tensors = {
        name: value.values() if isinstance(value, JaggedTensor) else value for name, value in moved.items()
    }
    before = {name: value.clone() for name, value in tensors.items()}
    for changed, tensor in tensors.items():
        tensor[0] = -1
        for name, value in tensors.items():
            if name != changed:
                assert value.equal(before[name]), (changed, name)
        assert tensor[1:].equal(before[changed][1:])
        tensor.copy_(before[changed])
    moved["labels"].lengths()[0] = 0
    assert int(moved["items"].lengths()[0]) == int(moved["next"].lengths()[0]) > 0
    assert buffer.equal(torch.arange(2 * count + rows)) and items.lengths().equal(lengths)
