"""Results of pieces come back as those of samples, and ranks that verify agree on pieces."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.distributed import ShufflerSettings
from tests.commons.distributed.loaded_batches import BOTH
from tests.commons.features.sample_splitting.cut_samples import AheadBatch, ahead_batch
from tests.commons.features.sample_splitting.drawn_cuts import drawn_cuts
from tests.commons.histories import TokenShuffler


def own_items(batch: AheadBatch) -> JaggedTensor:
    """Returns the items of each row without the one after them."""
    items, places = batch.features["item"], batch.pieces.rows
    parts = [
        items.values()[start : start + int(last - first)]
        for start, first, last in zip(
            items.offsets().tolist(), places["first_item"], places["last_item"], strict=False
        )
    ]
    lengths = places["last_item"] - places["first_item"]
    return JaggedTensor(torch.cat(parts), lengths=torch.from_numpy(lengths))


def _there_and_back(exchange: str, num_real: tuple[int, ...], seed: int) -> bool:
    """Returns whether a sample was cut."""
    rank = dist.get_rank()
    rng = np.random.default_rng(seed + 100 * rank)
    batch = ahead_batch(rng, rng.integers(0, 12, num_real[rank]), 5 - num_real[rank])
    shuffler = TokenShuffler(split=True, equal_rows=False, exchange=exchange, verify=True)
    shuffler.planner.cuts = partial(drawn_cuts, seed=seed)
    plan = shuffler.plan(batch)
    if plan.rows.starts_sample.all():
        return False
    arrived = shuffler.exchange(batch, plan)
    items, number = shuffler.unshuffle((own_items(arrived), arrived.number), plan)
    expected = batch.features["item"]
    assert torch.equal(number, batch.number)
    assert torch.equal(items.values(), expected.values()) and torch.equal(items.lengths(), expected.lengths())
    return True


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("num_real", [(5, 3), (4, 0, 5)])
def test_results_of_pieces_come_back_as_those_of_samples(pools, exchange, num_real):
    pool = pools(len(num_real))
    assert sum(pool.run(_there_and_back, exchange, num_real, seed)[0] for seed in range(4)) >= 2


def test_pieces_are_not_divided_into_micro_batches():
    message = "split=True: pieces of a sample are computed at once, and max_tokens_per_micro_batch=8"
    with pytest.raises(ValueError, match=message):
        ShufflerSettings(split=True, equal_rows=False, max_tokens_per_micro_batch=8)
