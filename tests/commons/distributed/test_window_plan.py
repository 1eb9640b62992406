"""Several steps planned together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import step_ratios
from tests.commons.distributed.loaded_batches import (
    BOTH,
    agreed,
    check_identical,
    history_batch,
    outputs_of,
    sample_ids,
)
from tests.commons.distributed.test_shuffle import FieldShuffler, QuickShuffler
from tests.drawn_batches import draw_batch, sample_contents


@dataclass(frozen=True)
class WindowCase:
    """For each rank the rows and real rows of the batches that it has left."""

    seed: int
    window: int
    equal_rows: bool
    exchange: str
    max_step_ratio: float | None
    agreed_before: bool
    batches: tuple[tuple[tuple[int, int], ...], ...]


@st.composite
def window_cases(draw, num_ranks: int):
    window = draw(st.sampled_from([2, 4]))
    kind = draw(st.sampled_from(["complete", "incomplete batches", "incomplete windows"]))
    batch_size = draw(st.integers(1, 5))
    counts = [window] * num_ranks
    if kind == "incomplete windows":
        counts = [draw(st.integers(0, window)) for _ in range(num_ranks)]
    return WindowCase(
        seed=draw(st.integers(0, 10**6)),
        window=window,
        equal_rows=draw(st.booleans()),
        exchange=draw(st.sampled_from(BOTH)),
        max_step_ratio=draw(st.sampled_from([None, 1.0, 1.5])),
        agreed_before=draw(st.booleans()),
        batches=tuple(
            tuple(
                (batch_size, batch_size if kind == "complete" else draw(st.integers(0, batch_size)))
                for _ in range(count)
            )
            for count in counts
        ),
    )


def _window(case):
    """On one rank: what it loaded, what it got in each step with its rows, and the window."""
    shuffler = QuickShuffler(
        equal_rows=case.equal_rows,
        exchange=case.exchange,
        window=case.window,
        window_max_step_ratio=case.max_step_ratio,
        verify=True,
    )
    if case.agreed_before:
        agreed(shuffler)
    rank = dist.get_rank()
    rng = np.random.default_rng((case.seed, rank))
    batches = [
        draw_batch(rng, 1000 * (rank + 1) + 100 * step, *sizes)
        for step, sizes in enumerate(case.batches[rank])
    ]
    window = shuffler.plan_window(batches)
    moved = []
    for step, plan in enumerate(window.steps if window.has_batch else ()):
        brought = shuffler.rows_for_step(batches, window, step)
        assert brought.num_samples == plan.num_loaded[rank]
        moved.append(shuffler.exchange(brought, plan))
        back = shuffler.unshuffle(moved[-1], plan)
        check_identical(sample_contents(back), sample_contents(brought))
    returned, outputs = [], []
    if window.has_batch:
        returned = shuffler.unshuffle_window(moved, window)
        outputs = shuffler.unshuffle_window([outputs_of(sample_ids(batch), 0) for batch in moved], window)
    for back, output, batch in zip(returned, outputs, batches, strict=True):
        check_identical(back, batch)
        check_identical(output, outputs_of(sample_ids(batch), batch.batch_size - batch.num_samples))
    return (
        [content for batch in batches for content in sample_contents(batch)],
        [sample_contents(batch) for batch in moved],
        [(batch.batch_size, batch.num_samples) for batch in moved],
        window,
    )


def _check_window(case, results) -> None:
    windows = [window for *_, window in results]
    for window in windows:
        assert (window, window.steps) == (windows[0], windows[0].steps)
    num_steps = max(map(len, case.batches))
    assert len(windows[0].steps) == max(num_steps, 1)
    before = Counter(content for loaded, *_ in results for content in loaded)
    after = Counter(content for _, steps, *_ in results for step in steps for content in step)
    assert before == after
    assert sum(before.values()) == sum(real for of_rank in case.batches for _, real in of_rank)
    sizes = [size for _, _, of_rank, _ in results for size in of_rank]
    if case.equal_rows and num_steps:
        total = sum(rows for of_rank in case.batches for rows, _ in of_rank)
        assert {rows for rows, _ in sizes} == {max(-(-total // (num_steps * len(results))), 1)}
        assert max(real for _, real in sizes) - min(real for _, real in sizes) <= 1
    elif num_steps:
        assert all(rows == max(real, 1) for rows, real in sizes)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_window_neither_loses_nor_doubles_a_sample(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=20, deadline=None)
    @given(case=window_cases(num_ranks))
    def conserved(case):
        _check_window(case, pool.run(_window, case))

    conserved()


def _rows_of_a_window_of_padding() -> list[tuple[int, int]]:
    shuffler = QuickShuffler(window=2)
    batches = [draw_batch(np.random.default_rng(0), 0, 3, 0)] * 2
    window = shuffler.plan_window(batches)
    moved = [
        shuffler.exchange(shuffler.rows_for_step(batches, window, step), plan)
        for step, plan in enumerate(window.steps)
    ]
    assert [batch.batch_size for batch in moved] == [plan.rows[dist.get_rank(), 0] for plan in window.steps]
    check_identical(dict(enumerate(shuffler.unshuffle_window(moved, window))), dict(enumerate(batches)))
    return [(batch.batch_size, batch.num_samples) for batch in moved]


def test_a_window_of_padding_only_has_as_many_rows_as_were_loaded(pools):
    assert pools(2).run(_rows_of_a_window_of_padding) == [[(3, 0), (3, 0)]] * 2


def _has_batch_without_batches() -> bool:
    shuffler = QuickShuffler(window=2)
    window = shuffler.plan_window([])
    return window.has_batch


def test_a_window_that_no_rank_has_batches_for_says_so(pools):
    assert pools(2).run(_has_batch_without_batches) == [False, False]


def _window_of_lognormal_lengths(max_step_ratio: float | None) -> np.ndarray:
    shuffler = FieldShuffler(window=4, window_max_step_ratio=max_step_ratio)
    rng = np.random.default_rng(dist.get_rank())
    batches = [history_batch(rng, 32) for _ in range(4)]
    window = shuffler.plan_window(batches)
    return step_ratios(window.workloads, [[np.flatnonzero(window.step == step)] for step in range(4)])


def test_no_step_of_a_window_is_larger_than_it_may_be(pools):
    free, limited = (pools(2).run(_window_of_lognormal_lengths, ratio)[0] for ratio in (None, 1.25))
    assert limited.max() <= 1.25 < free.max()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"window": 0}, "window=0: expected at least 1"),
        ({"window": -2}, "window=-2: expected at least 1"),
        ({"window_max_step_ratio": 1.5}, "window_max_step_ratio=1.5 has no effect with window=1"),
        ({"window": 2, "window_max_step_ratio": 0.9}, "window_max_step_ratio=0.9: expected at least 1"),
        ({"window": 2, "window_max_step_ratio": float("nan")}, "window_max_step_ratio=nan: expected"),
        ({"window": 2, "tolerance": 0.1}, "tolerance=0.1 has no effect with window=2"),
        ({"window": 2, "max_tokens": 9}, "max_tokens=9 has no effect with window=2"),
        ({"window": 2, "equal_rows": False, "max_rows": 9}, "max_rows=9 has no effect with window=2"),
        ({"window": 2, "partitioner": "rebalance"}, "partitioner='rebalance' has no effect with window=2"),
    ],
)
def test_settings_of_a_window_that_have_no_effect_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        FieldShuffler(**setting)


def test_a_rank_alone_keeps_its_rows_whatever_the_window():
    shuffler = FieldShuffler(window=4, verify=True)
    batches = [draw_batch(np.random.default_rng(number), 10 * number, 4, 3) for number in range(3)]
    window = shuffler.plan_window(batches)
    steps = [shuffler.rows_for_step(batches, window, step) for step in range(len(window.steps))]
    exchanged = [shuffler.exchange(batch, plan) for batch, plan in zip(steps, window.steps, strict=True)]
    assert exchanged == batches
    for returned, batch in zip(shuffler.unshuffle_window(exchanged, window), batches, strict=True):
        check_identical(returned, batch)


def test_more_batches_than_a_window_has_are_refused():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 3)
    with pytest.raises(ValueError, match="plan_window got 3 batches, expected at most window=2"):
        FieldShuffler(window=2).plan_window([batch] * 3)
