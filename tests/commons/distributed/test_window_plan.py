"""Windows: the sizes of their steps, and windows of padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from commons.partition import step_ratios
from tests.commons.distributed.loaded_batches import check_identical, history_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.drawn_batches import draw_batch


def _window_of_padding() -> list[tuple[int, int]]:
    shuffler = FieldShuffler(window=2)
    assert not shuffler.plan_window([]).has_batch
    batches = [draw_batch(np.random.default_rng(0), 0, 3, 0)] * 2
    window = shuffler.plan_window(batches)
    brought = [shuffler.batch_for_step(batches, window, step) for step in range(2)]
    moved = list(map(shuffler.exchange, brought, window.steps))
    assert [batch.batch_size for batch in moved] == [plan.rows[dist.get_rank(), 0] for plan in window.steps]
    check_identical(dict(enumerate(shuffler.unshuffle_window(moved, window))), dict(enumerate(batches)))
    return [(batch.batch_size, batch.num_samples) for batch in moved]


def test_a_window_of_padding_keeps_its_rows(pools):
    assert pools(2).run(_window_of_padding) == [[(3, 0), (3, 0)]] * 2


def _step_ratios() -> list[float]:
    """Returns the largest step over the mean step without a limit, and with a limit of 1.25."""
    rng = np.random.default_rng(dist.get_rank())
    batches = [history_batch(rng, 32) for _ in range(4)]
    largest = []
    for limit in (None, 1.25):
        window = FieldShuffler(window=4, window_max_step_ratio=limit).plan_window(batches)
        steps = [[np.flatnonzero(window.step == step)] for step in range(4)]
        largest.append(step_ratios(window.workloads, steps).max())
    return largest


def test_no_step_of_a_window_is_larger_than_it_may_be(pools):
    for free, limited in pools(2).run(_step_ratios):
        assert limited <= 1.25 < free


def test_more_batches_than_a_window_has_are_refused():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 3)
    with pytest.raises(ValueError, match="plan_window got 3 batches, expected at most window=2"):
        FieldShuffler(window=2).plan_window([batch] * 3)
