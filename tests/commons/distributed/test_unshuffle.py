"""What was computed of each sample comes back to the row that it was loaded in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.commons.distributed.loaded_batches import (
    agreed,
    check_identical,
    loaded_batch,
    lopsided_batch,
    outputs_of,
    sample_ids,
)
from tests.commons.distributed.test_shuffle import QuickShuffler, cases
from tests.drawn_batches import draw_batch


def _there_and_back(case, padded: bool) -> None:
    shuffler = agreed(
        QuickShuffler(exchange=case.exchange, equal_rows=case.equal_rows, partitioner=case.partitioner),
        case.labels,
    )
    batch, loaded = loaded_batch(shuffler, case)
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(loaded, plan)
    check_identical(shuffler.unshuffle(moved, plan), loaded)
    here = outputs_of(sample_ids(moved), moved.batch_size - moved.num_samples if padded else 0, junk=True)
    expected = outputs_of(sample_ids(loaded), loaded.batch_size - loaded.num_samples)
    check_identical(shuffler.unshuffle(here, plan), expected)
    for name in ("scores", "keyed", "tokens", "right"):
        check_identical(shuffler.unshuffle(here[name], plan), expected[name], name)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_was_computed_comes_back_to_the_rows_that_were_loaded(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=15, deadline=None)
    @given(case=cases(num_ranks), padded=st.booleans())
    def returned(case, padded):
        pool.run(_there_and_back, case, padded)

    returned()


def _after_the_last_batch() -> None:
    shuffler = agreed(QuickShuffler(verify=True))
    plan = shuffler.plan(None)
    assert not plan.has_batch
    padding = shuffler.padding_batch()
    moved = shuffler.exchange(padding, plan)
    check_identical(moved, padding)
    check_identical(shuffler.unshuffle(moved, plan), padding)
    check_identical(shuffler.unshuffle(torch.ones(1, 2), plan), torch.zeros(1, 2))


def test_padding_goes_there_and_back_once_all_loaders_have_ended(pools):
    pools(2).run(_after_the_last_batch)


def _other_outputs_back() -> None:
    shuffler = agreed(QuickShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    assert plan.moves
    ids = shuffler.exchange(batch, plan).matrix[:, 0, 0]
    learnt = (ids * torch.ones((), dtype=ids.dtype, requires_grad=True))[:, None]
    assert shuffler.unshuffle(learnt, plan)[:, 0].tolist() == sample_ids(batch)
    assert shuffler.unshuffle(learnt.cfloat(), plan)[:, 0].real.tolist() == sample_ids(batch)
    transposed = torch.stack([ids, -ids]).T
    assert shuffler.unshuffle(transposed, plan)[:, 1].tolist() == [-s for s in sample_ids(batch)]


def test_complex_transposed_and_differentiated_outputs_come_back(pools):
    pools(2).run(_other_outputs_back)


def _rows_without_bytes() -> tuple[int, ...]:
    shuffler = agreed(QuickShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    assert plan.moves
    return tuple(shuffler.unshuffle(torch.zeros(int(plan.rows[dist.get_rank(), 0]), 0), plan).shape)


def test_rows_without_bytes_come_back(pools):
    assert pools(2).run(_rows_without_bytes) == [(4, 0)] * 2


def _errors_of_the_way_back() -> list[str]:
    shuffler = QuickShuffler(window=2)
    batches = [draw_batch(np.random.default_rng(step), 0, 4, 3) for step in range(2)]
    window = shuffler.plan_window(batches)
    plan = window.steps[0]
    real = int(plan.num_placed[dist.get_rank()])
    wrong = [
        (torch.zeros(5), plan),
        (torch.zeros(real - 1), plan),
        (JaggedTensor(torch.zeros(0), lengths=torch.zeros(7).int()), plan),
        ({"rows": torch.zeros(4), "samples": torch.zeros(real)}, plan),
        (torch.zeros(()), plan),
        ([torch.zeros(4)], window),
        ([torch.zeros(4)] * 3, window),
    ]
    errors = []
    for values, of in wrong:
        back = shuffler.unshuffle_window if of is window else shuffler.unshuffle
        with pytest.raises(ValueError) as error:
            back(values, of)
        errors.append(str(error.value))
    return errors


def test_unshuffle_refuses_another_number_of_rows_or_steps(pools):
    for more, less, jagged, different, no_rows, one_step, three_steps in pools(2).run(
        _errors_of_the_way_back
    ):
        assert more == (
            "unshuffle got 5 rows in 'values', expected 4, as the exchange gave this rank, or 3 without the "
            "padding"
        )
        assert "got 2 rows" in less and "got 7 rows" in jagged
        assert "got 3 rows in 'samples'" in different
        assert "0-d" in no_rows
        assert "got values of 1 steps, the plan has 2" in one_step
        assert "got values of 3 steps, the plan has 2" in three_steps


def test_a_rank_alone_gets_its_rows_back_with_padding():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 3)
    shuffler = QuickShuffler()
    plan = shuffler.plan(batch)
    assert torch.equal(shuffler.unshuffle(batch.small, plan), batch.small)
    assert torch.equal(shuffler.unshuffle(batch.small[:3], plan), batch.small)
    with pytest.raises(ValueError, match="unshuffle got 99 rows"):
        shuffler.unshuffle(torch.ones(99), plan)
