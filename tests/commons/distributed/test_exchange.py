"""Both exchanges give the same batch, of what was planned and of nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from tests.commons.distributed.loaded_batches import BOTH, agreed, check_identical, loaded_batch
from tests.commons.distributed.shufflers import FieldShuffler, cases
from tests.drawn_batches import draw_batch, sample_contents, tensors_of
from tests.on_ranks import on_ranks


def _exchange_both_ways(case):
    """On one rank: what it loaded, its samples in the plan, and what it got, which is the same both ways."""
    settings = {"equal_rows": case.equal_rows, "partitioner": case.partitioner}
    moved = []
    for exchange in BOTH:
        shuffler = agreed(FieldShuffler(exchange=exchange, **settings), case.labels)
        batch, loaded = loaded_batch(shuffler, case)
        plan = shuffler.plan(batch)
        moved.append(shuffler.exchange(loaded, plan))
    check_identical(*moved)
    assert not any(tensor.data_ptr() % 16 for batch in moved for tensor in tensors_of(batch))
    rank = dist.get_rank()
    assert (moved[0].batch_size, moved[0].num_samples) == (plan.num_rows[rank], plan.num_placed[rank])
    for name, field in moved[0].per_sample_fields().items():
        # Padding rows are empty, or zero.
        padding = (
            field[plan.num_placed[rank] :]
            if isinstance(field, torch.Tensor)
            else field.lengths().view(-1, moved[0].batch_size)[:, plan.num_placed[rank] :]
        )
        assert not padding.any(), name
    return ([] if batch is None else sample_contents(batch)), plan.partition[rank], sample_contents(moved[0])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_exchanges_give_the_same_bits_in_the_order_of_the_plan(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=12, deadline=None)
    @given(case=cases(num_ranks))
    def same(case):
        results = pool.run(_exchange_both_ways, case)
        every = [content for loaded, _, _ in results for content in loaded]
        for _, samples, got in results:
            assert got == [every[sample] for sample in samples]

    same()


@on_ranks(2)
def test_exchange_refuses_rows_and_fields_that_were_not_planned():
    shuffler = agreed(FieldShuffler())
    rng = np.random.default_rng(dist.get_rank())
    batch = draw_batch(rng, 0, 4, 3)
    plan = shuffler.plan(batch)
    other_dtype = dataclasses.replace(batch, small=batch.small.float())
    errors = []
    for other in (draw_batch(rng, 0, 5, 3), shuffler.padding_batch(), other_dtype):
        with pytest.raises(ValueError) as error:
            shuffler.exchange(other, plan)
        errors.append(str(error.value))
    full = draw_batch(rng, 0, 4, 4)
    plan = shuffler.plan(full)
    other_lengths = draw_batch(rng, 0, 4, 4)
    with pytest.raises(ValueError) as error:
        shuffler.exchange(other_lengths, plan)
    rows, ended, dtype, lengths = [*errors, str(error.value)]
    for error in (rows, ended, dtype, lengths):
        assert "give exchange the batch that plan was made for" in error
    assert "got a batch of 5 rows" in rows and "the plan is for 4 rows" in rows
    assert "got a batch of 1 rows" in ended


def test_an_unknown_exchange_is_refused():
    with pytest.raises(KeyError, match=r"unknown exchange='ring'; there are \['all_gather', 'all_to_all'\]"):
        FieldShuffler(exchange="ring")
