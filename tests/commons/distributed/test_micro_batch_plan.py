"""Steps in micro-batches: as many on every rank, under the cap, and everything comes back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BalanceReport, BatchShufflerFactory, batch_shuffler
from commons.distributed.placement import PARTITIONERS
from tests.commons.distributed.container_batches import KINDS, ContainerShuffler, contents, make_batch
from tests.commons.distributed.loaded_batches import (
    BOTH,
    agreed,
    check_identical,
    lopsided_batch,
    outputs_of,
    sample_ids,
)
from tests.commons.distributed.test_collectives import (
    DictShuffler,
    _collectives,
    _SynchronisingCalls,
    _SynchronisingOps,
)
from tests.commons.distributed.test_shuffle import FieldShuffler, QuickShuffler
from tests.drawn_batches import draw_batch, sample_contents

LIMITED = [name for name in PARTITIONERS if name != "karmarkar_karp"]
some_ranks = pytest.mark.parametrize("num_ranks", [2, 3, 4])


@dataclass(frozen=True)
class Case:
    """Settings of a shuffler, and for each rank the rows and real rows of its batches."""

    seed: int
    labels: str
    settings: dict[str, Any]
    batches: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def cap(self) -> int:
        return self.settings["max_tokens_per_micro_batch"]


@st.composite
def cases(draw, num_ranks: int, windows: Sequence[int] = (1, 2), partitioners=PARTITIONERS):
    """Samples have up to 12 tokens: some caps are below that, some hold several, and one holds all."""
    window = draw(st.sampled_from(windows))
    kind = draw(st.sampled_from(["complete", "incomplete batches", "uneven", "ranks without batches"]))
    batch_size = draw(st.integers(1, 8))

    def rows():
        size = draw(st.integers(1, 8)) if kind == "uneven" else batch_size
        return size, size if kind == "complete" else draw(st.integers(0, size))

    counts = [window] * num_ranks
    if kind == "ranks without batches":
        counts = [draw(st.integers(0, window)) for _ in counts]
    drawn_settings = {
        "equal_rows": draw(st.booleans()),
        "exchange": draw(st.sampled_from(BOTH)),
        "partitioner": draw(st.sampled_from(partitioners)) if window == 1 else "refined",
        "window": window,
        "max_tokens_per_micro_batch": draw(st.sampled_from([1, 6, 12, 13, 30, 10**6])),
        "small_micro_batches_at_ends": draw(st.booleans()),
    }
    return Case(
        seed=draw(st.integers(0, 10**6)),
        labels=draw(st.sampled_from(["keyed", "dense", "flat", "none"])),
        settings=drawn_settings,
        batches=tuple(tuple(rows() for _ in range(count)) for count in counts),
    )


def _planned(case):
    """This rank's shuffler, what it loaded, and the window."""
    shuffler = agreed(QuickShuffler(**case.settings, verify=True), case.labels)
    rank = dist.get_rank()
    rng = np.random.default_rng((case.seed, rank))
    batches = [
        draw_batch(rng, 1000 * (rank + 1) + 100 * number, *sizes, case.labels)
        for number, sizes in enumerate(case.batches[rank])
    ]
    return shuffler, batches, shuffler.plan_window(batches)


def _steps(case):
    """For each step the shuffler, the plan, what this rank brings and gets, and its micro-batches."""
    shuffler, batches, window = _planned(case)
    for step, plan in enumerate(window.steps):
        brought = shuffler.rows_for_step(batches, window, step)
        moved = shuffler.exchange(brought, plan)
        yield shuffler, plan, brought, moved, shuffler.micro_batches(moved, plan)


def _numbers(plan):
    """For each rank and micro-batch the numbers of its samples."""
    return [
        [placed[rows] for rows in of_rank]
        for placed, of_rank in zip(plan.partition, plan.micro_batches, strict=True)
    ]


def _check_divided(plan, cap) -> None:
    """Every sample of a rank is in one of its micro-batches, which keep to the cap."""
    assert len(plan.micro_batches) == plan.num_ranks
    assert {len(of_rank) for of_rank in plan.micro_batches} == {plan.num_micro_batches}
    assert plan.num_micro_batches >= 1
    for of_rank, placed in zip(plan.micro_batches, plan.num_placed, strict=True):
        assert all((np.diff(rows) > 0).all() for rows in of_rank)
        assert sorted(np.concatenate(of_rank).tolist()) == list(range(placed))
    for of_rank in _numbers(plan):
        assert all(len(samples) == 1 or plan.tokens[samples].sum() <= cap for samples in of_rank)


def _plans(case):
    _, _, window = _planned(case)
    return [(plan, plan.fingerprint) for plan in window.steps]


@some_ranks
def test_every_rank_has_as_many_micro_batches_under_the_cap_the_lightest_first_or_at_both_ends(
    pools, num_ranks
):
    pool = pools(num_ranks)

    @settings(max_examples=12, deadline=None)
    @given(case=cases(num_ranks))
    def divided(case):
        of_ranks = pool.run(_plans, case)
        assert len(of_ranks[0]) == max(map(len, case.batches))
        assert all(plans == of_ranks[0] for plans in of_ranks)
        for plan, _ in of_ranks[0]:
            _check_divided(plan, case.cap)
            for of_rank in _numbers(plan):
                loads = [int(plan.workloads[samples].sum()) for samples in of_rank]
                if case.settings["small_micro_batches_at_ends"]:  # first, last, second, last but one …
                    loads = [loads.pop(0 if turn % 2 == 0 else -1) for turn in range(len(loads))]
                assert loads == sorted(loads)

    divided()


def _fingerprints() -> list[int]:
    shuffler = agreed(QuickShuffler(max_tokens_per_micro_batch=13))
    plan = shuffler.plan(lopsided_batch())
    numbers = _numbers(plan)
    assert plan.num_micro_batches > 1
    in_another_order = [of_rank[::-1] for of_rank in numbers]
    one_more = [[np.zeros(0, dtype=np.int64), *of_rank] for of_rank in numbers]
    whole = [[placed] for placed in plan.partition]
    others = [plan.in_micro_batches(other) for other in (in_another_order, one_more, whole)]
    assert plan.in_micro_batches(numbers) == plan
    assert not any(other == plan for other in others)
    without = QuickShuffler().plan(lopsided_batch())
    return [made.fingerprint for made in (plan, plan.in_micro_batches(numbers), *others, without)]


def test_plans_that_differ_in_their_micro_batches_have_other_fingerprints(pools):
    first, second = pools(2).run(_fingerprints)
    assert first == second
    assert first[0] == first[1]
    assert len(set(first[1:])) == len(first) - 1


def _error_of_another_order() -> str:
    shuffler = QuickShuffler(
        verify=True, max_tokens_per_micro_batch=8, small_micro_batches_at_ends=dist.get_rank() == 1
    )
    with pytest.raises(RuntimeError) as error:
        shuffler.plan(lopsided_batch())
    return str(error.value)


def test_ranks_that_divide_otherwise_are_stopped_by_the_check(pools):
    first, second = pools(2).run(_error_of_another_order)
    assert first == second
    assert "plan" in first


def _micro_batches_hold_the_batch(case) -> None:
    for _, plan, _, moved, micro_batches in _steps(case):
        rows_of_each = plan.micro_batches[dist.get_rank()]
        of_batch = sample_contents(moved)
        assert len(of_batch) == sum(map(len, rows_of_each))
        for micro_batch, rows in zip(micro_batches, rows_of_each, strict=True):
            assert type(micro_batch) is type(moved)
            assert sample_contents(micro_batch) == [of_batch[row] for row in rows]
            assert (micro_batch.batch_size, micro_batch.num_samples) == (max(len(rows), 1), len(rows))
            assert micro_batch.shared is moved.shared
            assert micro_batch.feature_to_max_seqlen == moved.feature_to_max_seqlen
            assert len(rows) <= 1 or int(micro_batch.num_tokens().sum()) <= case.cap


@some_ranks
def test_micro_batches_hold_the_samples_of_the_batch_in_its_order_and_no_padding(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=10, deadline=None)
    @given(case=cases(num_ranks))
    def held(case):
        pool.run(_micro_batches_hold_the_batch, case)

    held()


def _outputs(batch, padded: bool) -> dict:
    num_padding = batch.batch_size - batch.num_samples if padded else 0
    return outputs_of(sample_ids(batch), num_padding, junk=True)


def _expected(batch) -> dict:
    return outputs_of(sample_ids(batch), batch.batch_size - batch.num_samples)


def _there_and_back(case, padded: bool) -> None:
    for shuffler, plan, brought, moved, micro_batches in _steps(case):
        check_identical(shuffler.unshuffle(micro_batches, plan), brought)
        check_identical(shuffler.unshuffle(moved, plan), brought)
        expected = _expected(brought)
        of_each = [_outputs(micro_batch, padded) for micro_batch in micro_batches]
        check_identical(shuffler.unshuffle(of_each, plan), expected)
        check_identical(shuffler.unshuffle(_outputs(moved, padded), plan), expected)
        for name in ("scores", "keyed", "tokens", "right"):
            back = shuffler.unshuffle([values[name] for values in of_each], plan)
            check_identical(back, expected[name], name)


@some_ranks
def test_what_was_computed_of_micro_batches_comes_back_to_the_rows_that_were_loaded(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=8, deadline=None)
    @given(case=cases(num_ranks), padded=st.booleans())
    def returned(case, padded):
        pool.run(_there_and_back, case, padded)

    returned()


def _back_to_the_window(case, padded: bool) -> None:
    shuffler, batches, window = _planned(case)
    moved = [
        shuffler.exchange(shuffler.rows_for_step(batches, window, step), plan)
        for step, plan in enumerate(window.steps)
    ]
    of_steps = list(map(shuffler.micro_batches, moved, window.steps))
    outputs = [[_outputs(one, padded) for one in micro_batches] for micro_batches in of_steps]
    whole = [_outputs(batch, padded) for batch in moved]
    for values, expected in (
        (of_steps, batches),
        (moved, batches),
        (outputs, list(map(_expected, batches))),
        (whole, list(map(_expected, batches))),
    ):
        for back, batch in zip(shuffler.unshuffle(values, window), expected, strict=True):
            check_identical(back, batch)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_was_computed_in_a_window_comes_back_to_the_batches_that_were_loaded(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=8, deadline=None)
    @given(case=cases(num_ranks), padded=st.booleans())
    def returned(case, padded):
        pool.run(_back_to_the_window, case, padded)

    returned()


def _errors_of_the_way_back() -> None:
    shuffler = agreed(QuickShuffler(window=2, max_tokens_per_micro_batch=13))
    window = shuffler.plan_window([lopsided_batch(), lopsided_batch()])
    rank, plan = dist.get_rank(), window.steps[0]
    values = [[torch.zeros(len(rows), 2) for rows in step.micro_batches[rank]] for step in window.steps]
    of_step, count = values[0], plan.num_micro_batches
    too_many = [*of_step[:-1], torch.zeros(len(of_step[-1]) + 7, 2)]
    for wrong, of, message in (
        (of_step[1:], plan, f"values of {count - 1} micro-batches, the plan has {count}"),
        (
            [*of_step, torch.zeros(1, 2)],
            plan,
            f"values of {count + 1} micro-batches, the plan has {count}",
        ),
        ([], plan, f"values of 0 micro-batches, the plan has {count}"),
        (too_many, plan, f"unshuffle got {len(too_many[-1])} rows in 'values', expected"),
        ([of_step[1:], values[1]], window, f"values of {count - 1} micro-batches, the plan has {count}"),
        ([of_step], window, "values of 1 steps, the window has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            shuffler.unshuffle(wrong, of)


def test_the_way_back_refuses_another_number_of_micro_batches_or_rows(pools):
    pools(2).run(_errors_of_the_way_back)


def _histories(lengths: list[int], workloads: list[int]) -> dict:
    """A batch of samples with so many tokens."""
    ids = KeyedJaggedTensor(["items"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))
    return {"ids": ids, "workload": torch.tensor(workloads)}


def _tokens_of_ranks(partitioner: str, max_tokens: int | None) -> tuple[list[int], int]:
    """One sample has as much work as all others, and few tokens."""
    shuffler = DictShuffler(
        equal_rows=False, partitioner=partitioner, max_tokens=max_tokens, max_tokens_per_micro_batch=35
    )
    light = [5] * 7
    batch = _histories([1, *light], [70, *light]) if dist.get_rank() == 0 else _histories(light, light)
    plan = shuffler.plan(batch)
    _check_divided(plan, 35)
    return [int(plan.tokens[placed].sum()) for placed in plan.partition], plan.num_micro_batches


@pytest.mark.parametrize("partitioner", LIMITED)
def test_the_cap_of_a_rank_holds_beside_that_of_its_micro_batches(pools, partitioner):
    free, limited = (pools(2).run(_tokens_of_ranks, partitioner, most)[0] for most in (None, 50))
    assert max(limited[0]) <= 50 < max(free[0]) == 70
    assert free[1] == limited[1] == 2


def _limited_plans(case, max_tokens: int):
    """The plans, or why there are none."""
    try:
        return _plans(replace(case, settings={**case.settings, "max_tokens": max_tokens}))
    except ValueError as error:
        return str(error)


@settings(max_examples=12, deadline=None)
@given(
    case=cases(3, windows=[1], partitioners=LIMITED),
    max_tokens=st.sampled_from([30, 45, 60]),
)
def test_both_caps_hold_or_no_rank_has_a_plan(pools, case, max_tokens):
    results = pools(3).run(_limited_plans, case, max_tokens)
    assert all(result == results[0] for result in results)
    if isinstance(results[0], str):
        assert f"max_tokens={max_tokens}" in results[0]
        return
    for plan, _ in results[0]:
        _check_divided(plan, case.cap)
        assert max(int(plan.tokens[placed].sum()) for placed in plan.partition) <= max_tokens


def _planned_alone(case) -> list:
    """The plan of a single batch, without windows and as all that is left for a window."""
    batch = draw_batch(np.random.default_rng((case.seed, dist.get_rank())), 0, 12, 12, case.labels)
    shufflers = [QuickShuffler(**{**case.settings, "window": window}) for window in (1, 2)]
    return [shuffler.plan_window([batch]).steps for shuffler in shufflers]


@settings(max_examples=8, deadline=None)
@given(case=cases(3, partitioners=["refined"]))
def test_a_step_that_is_all_of_its_window_is_planned_as_without_windows(pools, case):
    for without, alone in pools(3).run(_planned_alone, case):
        assert alone == without


def _divide_container(kind: str, seed: int, rows: tuple[int, ...], cap: int) -> int:
    shuffler = ContainerShuffler(verify=True, max_tokens_per_micro_batch=cap)
    rank = dist.get_rank()
    batch = make_batch(kind, seed, 1000 * (rank + 1), rows[rank])
    plan = shuffler.plan(batch)
    _check_divided(plan, cap)
    moved = shuffler.exchange(batch, plan)
    micro_batches = shuffler.micro_batches(moved, plan)
    every = contents(moved)
    for micro_batch, of_one in zip(micro_batches, plan.micro_batches[rank], strict=True):
        assert type(micro_batch) is type(batch)
        got = contents(micro_batch)
        assert got[: len(of_one)] == [every[row] for row in of_one]
        assert len(got) == max(len(of_one), 1)
        if kind == "dict":
            assert list(micro_batch) == list(batch)
            for shared in ("name", "rate", "limits", "nothing"):
                assert micro_batch[shared] is batch[shared]
        elif kind == "tensordict":
            assert micro_batch.batch_size == (len(got),)
    back = shuffler.unshuffle(micro_batches, plan)
    check_identical(*((vars(back), vars(batch)) if kind == "torchrec" else (back, batch)))
    return plan.num_micro_batches


@pytest.mark.parametrize("kind", KINDS)
def test_any_container_is_divided_and_comes_back(pools, kind):
    pool = pools(3)

    @settings(max_examples=10, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        rows=st.tuples(*[st.integers(1, 6)] * 3),
        cap=st.sampled_from([4, 9, 10**6]),
    )
    def divided(seed, rows, cap):
        (count,) = set(pool.run(_divide_container, kind, seed, rows, cap))
        assert count == 1 or cap < 10**6

    divided()


def _not_divided() -> bool:
    shuffler = agreed(QuickShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    (alone,) = shuffler.micro_batches(moved, plan)
    assert (plan.micro_batches, plan.num_micro_batches) == ((), 0)
    return alone is moved and plan.with_micro_batches_of_none(5) is plan


def test_without_a_cap_a_batch_is_its_only_micro_batch(pools):
    assert pools(2).run(_not_divided) == [True, True]


def _samples_in_more_micro_batches(case) -> None:
    _, _, window = _planned(case)
    for plan in window.steps:
        for min_count in range(plan.num_micro_batches + 4):
            more = plan.with_micro_batches_of_none(min_count)
            assert more.num_micro_batches == max(min_count, plan.num_micro_batches)
            assert (more is plan) == (min_count <= plan.num_micro_batches)
            assert all(map(np.array_equal, more.partition, plan.partition))
            _check_divided(more, case.cap)


@settings(max_examples=10, deadline=None)
@given(case=cases(3))
def test_a_plan_in_more_micro_batches_has_the_same_samples_on_every_rank(pools, case):
    pools(3).run(_samples_in_more_micro_batches, case)


def test_a_rank_that_never_had_a_batch_goes_along_with_as_many_micro_batches_as_others():
    shuffler = BatchShufflerFactory.create("identity", max_tokens_per_micro_batch=9)
    plan = shuffler.empty_plan().with_micro_batches_of_none(3)
    padding = draw_batch(np.random.default_rng(0), 0, 1, 0)  # of another rank
    micro_batches = shuffler.micro_batches(shuffler.exchange(padding, plan), plan)
    assert len(micro_batches) == plan.num_micro_batches == 3
    for micro_batch in micro_batches:
        check_identical(micro_batch, padding)
    check_identical(shuffler.unshuffle([torch.ones(1, 2)] * 3, plan), torch.zeros(1, 2))


def _collectives_of_a_step(cap: int | None, exchange: str, window: int) -> list[list[str]]:
    shuffler = agreed(
        QuickShuffler(exchange=exchange, window=window, max_tokens_per_micro_batch=cap, verify=True)
    )
    batches = [lopsided_batch() for _ in range(window)]
    counted = []
    with _collectives() as calls:
        planned = shuffler.plan_window(batches)
        brought = shuffler.rows_for_step(batches, planned, 0)
        moved = shuffler.exchange(brought, planned.steps[0])
    counted.append([name for name, _ in calls])
    assert planned.steps[0].moves
    with _collectives() as calls, _SynchronisingOps(), _SynchronisingCalls():
        micro_batches = shuffler.micro_batches(moved, planned.steps[0])
    assert calls == []
    assert cap is None or len(micro_batches) > 1
    of_each = micro_batches if cap else moved
    dense = [micro_batch.small for micro_batch in micro_batches] if cap else moved.small
    for values in (of_each, dense):
        with _collectives() as calls:
            shuffler.unshuffle(values, planned.steps[0])
        counted.append([name for name, _ in calls])
    return counted


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("exchange", BOTH)
def test_micro_batches_take_no_collective_and_never_wait_for_the_device(pools, exchange, window):
    whole, divided = (pools(3).run(_collectives_of_a_step, cap, exchange, window) for cap in (None, 13))
    assert divided == whole
    assert all(map(len, whole[0]))


def _dict_without_waiting() -> int:
    shuffler = ContainerShuffler(max_tokens_per_micro_batch=9)
    batch = make_batch("dict", 0, 1000 * dist.get_rank(), 6)
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    with _SynchronisingOps(), _SynchronisingCalls():
        return len(shuffler.micro_batches(moved, plan))


def test_dividing_a_dict_never_waits_for_the_device(pools):
    (count,) = set(pools(2).run(_dict_without_waiting))
    assert count > 1


def _reports(case) -> list[BalanceReport]:
    shuffler, _, window = _planned(case)
    return [
        BalanceReport.of(plan, shuffler.equal_rows, shuffler.traffic(plan), window, step)
        for step, plan in enumerate(window.steps)
    ]


@settings(max_examples=10, deadline=None)
@given(case=cases(3))
def test_reported_loads_of_micro_batches_add_up_to_those_of_the_ranks(pools, case):
    plans = [plan for plan, _ in pools(3).run(_plans, case)[0]]
    for report, plan in zip(pools(3).run(_reports, case)[0], plans, strict=True):
        assert report.num_micro_batches == plan.num_micro_batches
        assert report.micro_batch_loads.shape == (3, plan.num_micro_batches)
        assert np.array_equal(report.micro_batch_loads.sum(1), report.loads_after)
        assert report.micro_batch_imbalance >= report.imbalance_after - 1e-12
        if plan.num_micro_batches == 1:
            assert report.micro_batch_imbalance == report.imbalance_after


def test_the_report_of_a_batch_that_runs_whole_has_one_micro_batch():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 4)
    report = BalanceReport.of(FieldShuffler().plan(batch), equal_rows=True)
    assert (report.micro_batch_loads, report.num_micro_batches) == (None, 1)
    assert report.micro_batch_imbalance == report.imbalance_after


NAMED = "row {} of a batch of {} has {} tokens, above max_tokens_per_micro_batch=20: it gets a micro"


def test_a_sample_above_the_cap_is_named_once_and_again_where_one_is_longer(caplog):
    shuffler = BatchShufflerFactory.create("identity", window=2, max_tokens_per_micro_batch=20)
    named = []
    for of_batches in ([[3, 20]], [[3, 50, 21]], [[50], [49, 30]], [[4, 8], [20, 9, 51]], [[51]]):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            batches = [_histories(lengths, [1] * len(lengths)) for lengths in of_batches]
            window = shuffler.plan_window(batches)
        for plan in window.steps:
            _check_divided(plan, 20)
        named.append([record.getMessage() for record in caplog.records])
    assert [len(messages) for messages in named] == [0, 1, 0, 1, 0]
    assert named[1][0].startswith(NAMED.format(1, "rank 0", 50))
    assert named[3][0].startswith(NAMED.format(2, "rank 0", 51))


def _named_samples(lengths: tuple[list[int], ...]) -> list[str]:
    shuffler = DictShuffler(max_tokens_per_micro_batch=20)
    mine = lengths[dist.get_rank()]
    with mock.patch.object(batch_shuffler.logger, "warning") as warning:
        shuffler.plan(_histories(mine, [1] * len(mine)))
    return [call.args[0] for call in warning.call_args_list]


def test_a_sample_above_the_cap_is_named_by_one_rank_with_that_which_loaded_it(pools):
    named, *nothing = pools(3).run(_named_samples, ([2, 30], [4, 5, 99, 7], [98]))
    assert [len(messages) for messages in (named, *nothing)] == [1, 0, 0]
    assert named[0].startswith(NAMED.format(2, "rank 1", 99))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch=0: expected at least 1"),
        ({"max_tokens_per_micro_batch": -3}, "max_tokens_per_micro_batch=-3: expected at least 1"),
        (
            {"small_micro_batches_at_ends": True},
            "small_micro_batches_at_ends has no effect without max_tok",
        ),
    ],
)
@pytest.mark.parametrize("name", ["identity", "field"])
def test_settings_of_micro_batches_out_of_range_are_named(name, setting, message):
    with pytest.raises(ValueError, match=message):
        FieldShuffler(**setting) if name == "field" else BatchShufflerFactory.create(name, **setting)
