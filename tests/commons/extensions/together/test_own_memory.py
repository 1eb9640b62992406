"""Each field that extensions make has memory of its own."""

import numpy as np
import pytest
import torch.distributed as dist

from commons.extensions.controller import merge, split_balanced
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.unshuffle import Unshuffle
from tests.commons.distributed.shufflers import FieldShuffler
from tests.drawn_batches import draw_batch
from tests.on_ranks import on_ranks
from tests.own_memory import check_own_memory


def test_chunks_and_what_is_merged_of_them_share_no_memory():
    loaded = draw_batch(np.random.default_rng(0), 0, 9, 8)
    chunks, order = split_balanced(loaded, 3, loaded.workload + 1)
    for number, chunk in enumerate(chunks):
        check_own_memory(chunk, loaded, *chunks[number + 1 :])
    check_own_memory(merge(chunks, order), loaded, *chunks)


@pytest.mark.parametrize("num_samples", [(6, 5), (1, 0)])
@on_ranks(2)
def test_micro_batches_and_values_that_return_share_no_memory(num_samples):
    micro, unshuffle, rank = MicroBatches(max_tokens=8), Unshuffle(), dist.get_rank()
    shuffler = FieldShuffler(extensions=[micro, unshuffle], equal_rows=False)
    loaded = draw_batch(np.random.default_rng(rank), 100 * rank, 6, num_samples[rank])
    plan = shuffler.plan(loaded)
    batch = shuffler.exchange(loaded, plan)
    parts = micro.micro_batches(batch, plan)
    for number, part in enumerate(parts):
        check_own_memory(part, batch, loaded, *parts[number + 1 :])
    values = [{"features": part.features, "jagged": part.jagged, "flags": part.flags} for part in parts]
    joined = micro.join_values(values, plan)
    check_own_memory(joined, *parts)
    check_own_memory(unshuffle.unshuffle(joined, plan), joined, *parts)
