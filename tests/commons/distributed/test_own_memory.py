"""Each field that the library makes has memory of its own."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.commons.distributed.loaded_batches import BOTH
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler
from tests.drawn_batches import draw_batch, sample_contents, tensors_of
from tests.on_ranks import on_ranks
from tests.own_memory import check_own_memory


@pytest.mark.parametrize("labels", ["keyed", "dense", "flat"])
@pytest.mark.parametrize("exchange", BOTH)
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


@on_ranks(2)
def test_a_model_may_work_in_place_on_a_copied_row():
    shuffler = DictShuffler()
    for batch, plan in shuffler.plan_ahead([{"workload": torch.ones(1)}] * 3 if dist.get_rank() else []):
        moved = shuffler.exchange(batch, plan)
        assert moved["workload"].tolist() == [1.0]
        moved["workload"].mul_(1e30)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_planning_ahead_leaves_memory_that_torch_may_resize(pools, num_ranks, enabled):
    pools(num_ranks).run(_plan_and_look_at_memory, enabled)


def _plan_and_look_at_memory(enabled):
    # Ranks compare their first batches: the dense fields, ids, and weights of at least 4 rows.
    ids = JaggedTensor(torch.arange(5) + dist.get_rank(), lengths=torch.ones(5).long(), weights=torch.rand(5))
    batches = [{"workload": torch.arange(5), "score": torch.rand(5), "ids": ids}, {"workload": torch.ones(1)}]
    for batch in batches:
        for _ in DictShuffler(enabled=enabled).plan_ahead([batch]):
            assert all(tensor.untyped_storage().resizable() for tensor in tensors_of(batch))


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
        "workload": lengths**2,
    }
    check_own_memory(DictShuffler().shuffle(loaded), loaded)
