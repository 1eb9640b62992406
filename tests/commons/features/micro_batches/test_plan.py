"""Micro-batches of any container, and samples above the cap."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BalanceReport, BatchShufflerFactory, IdentityShuffler, ShufflePlan
from commons.distributed.shuffler_settings import ShufflerSettings
from tests.commons.distributed.compiled_kernels import before_and_after_placing
from tests.commons.distributed.container_batches import check_shared, contents
from tests.commons.distributed.counted_collectives import (
    no_synchronization,
    recorded_collectives,
    wrong_counts_on_host,
)
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.distributed.loaded_batches import BOTH, lopsided_batch, many_fields
from tests.commons.distributed.shufflers import Case, DictShuffler, FieldShuffler, cases, exchanged
from tests.commons.features.micro_batches.divided import check_divided
from tests.commons.histories import TokenShuffler, draw_histories
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("cap", [0, -3])
def test_a_cap_below_one_token_is_refused(cap):
    with pytest.raises(ValueError, match=f"max_tokens_per_micro_batch={cap}: expected an integer"):
        ShufflerSettings(max_tokens_per_micro_batch=cap)


@pytest.mark.parametrize("partitioner", ["refined", "rebalance"])
def test_a_token_tolerance_is_off_with_micro_batches(partitioner):
    assert ShufflerSettings(partitioner, max_tokens_per_micro_batch=9).heeded_token_tolerance is None


def _error_of_another_cap() -> str:
    cap = 8 if dist.get_rank() == 1 else 16
    return error_of(FieldShuffler(max_tokens_per_micro_batch=cap).plan, lopsided_batch())


def test_ranks_that_would_divide_differently_are_refused(pools):
    first, second = pools(2).run(_error_of_another_cap)
    assert first == second
    assert first.startswith("ValueError: rank 1's shuffler has") and "all ranks need the same" in first


CAPS = [1, 6, 12, 13, 30, 10**6]


def _divide(case: Case) -> tuple[ShufflePlan, BalanceReport] | None:
    """Checks that micro-batches have the samples of the batch in its order, and no padding."""
    step = exchanged(case)
    if isinstance(step, str):
        return None
    plan, shuffler = step.plan, step.shuffler
    every, of_rank = contents(step.moved), plan.micro_batches_on(shuffler.group.rank)
    for micro_batch, rows in zip(shuffler.micro_batches(step.moved, plan), of_rank, strict=True):
        check_shared(micro_batch, step.moved)
        assert contents(micro_batch)[: len(rows)] == [every[row] for row in rows]
        num_rows, _ = shuffler.sample_rows.batch_rows(micro_batch)
        assert num_rows == max(len(rows), 1)
        assert case.kind != "mixed" or micro_batch.num_samples == len(rows)
    return plan, BalanceReport.of(plan, case.equal_rows, shuffler.traffic(plan))


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from([2, 3, 3, 4]).flatmap(lambda ranks: cases(ranks, max_tokens_per_micro_batch=CAPS))
)
def test_every_sample_is_in_one_micro_batch_and_the_lightest_come_first(pools, case):
    results = pools(len(case.batches)).run(_divide, case)
    if results[0] is None:
        return
    for plan, report in results:
        assert plan == results[0][0]
        check_divided(plan, case.settings["max_tokens_per_micro_batch"])
        for rank, samples in enumerate(plan.partition):
            loads = [plan.workloads[samples[rows]].sum() for rows in plan.micro_batches_on(rank)]
            assert loads == sorted(loads) == report.micro_batch_loads[rank].tolist()
        assert report.num_micro_batches == plan.num_micro_batches
        assert report.micro_batch_imbalance >= report.imbalance_after - 1e-12


@on_ranks(2)
def test_without_a_cap_the_batch_is_the_only_micro_batch():
    shuffler, batch = FieldShuffler(), lopsided_batch()
    plan = shuffler.plan(batch)
    moved, report = shuffler.exchange(batch, plan), BalanceReport.of(plan, True)
    assert (plan.micro_batches_on(dist.get_rank()), plan.num_micro_batches) == ([], 0)
    (micro_batch,) = shuffler.micro_batches(moved, plan)
    assert micro_batch is moved
    assert (report.micro_batch_loads, report.num_micro_batches) == (None, 1)
    assert report.micro_batch_imbalance == report.imbalance_after


def _collectives(exchange: str, cap: int | None) -> list[str]:
    """Returns those of a step; to divide it takes none, and waits for no device."""
    shuffler = DictShuffler(exchange=exchange, max_tokens_per_micro_batch=cap)
    shuffler.shuffle(many_fields(0))
    batch = many_fields(1)
    with recorded_collectives() as calls:
        plan = shuffler.plan(batch)
        with no_synchronization():
            micro_batches = shuffler.micro_batches(shuffler.exchange(batch, plan), plan)
    assert plan.moves and (len(micro_batches) > 1) == (cap is not None)
    return [name for name, _ in calls]


@pytest.mark.parametrize("exchange", BOTH)
def test_micro_batches_take_no_collective_and_never_wait_for_the_device(pools, exchange):
    whole, divided = (pools(3).run(_collectives, exchange, cap) for cap in (None, 9))
    assert divided == whole and all(map(len, whole))


def _histories(lengths: list[int]) -> dict:
    """Makes a batch of samples of so many tokens and equal cost."""
    ids = KeyedJaggedTensor(["items"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))
    return {"ids": ids, "workload": torch.ones(len(lengths), dtype=torch.int64)}


NAMED = "row {} of a batch of {} has {} tokens, above max_tokens_per_micro_batch=20: it gets a micro"


def test_a_sample_above_the_cap_is_named_once_until_a_longer_one_comes(caplog):
    shuffler = BatchShufflerFactory.create("identity", max_tokens_per_micro_batch=20)
    named = []
    for lengths in ([3, 20], [3, 50, 21], [50, 49, 30], [20, 9, 51], [51]):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            plan = shuffler.plan(_histories(lengths))
        check_divided(plan, 20)
        messages = [record.getMessage() for record in caplog.records]
        named.append([message for message in messages if "above max_tokens" in message])
    assert [len(messages) for messages in named] == [0, 1, 0, 1, 0]
    assert named[1][0].startswith(NAMED.format(1, "rank 0", 50))
    assert named[3][0].startswith(NAMED.format(2, "rank 0", 51))


def _named_samples(lengths: tuple[list[int], ...]) -> list[str]:
    with warnings_of("commons.distributed.planner") as messages:
        DictShuffler(max_tokens_per_micro_batch=20).plan(_histories(lengths[dist.get_rank()]))
    return messages


def test_rank_0_names_a_sample_above_the_cap_and_the_rank_that_loaded_it(pools):
    named, *nothing = pools(3).run(_named_samples, ([2, 30], [4, 5, 99, 7], [98]))
    assert [len(messages) for messages in (named, *nothing)] == [1, 0, 0]
    assert named[0].startswith(NAMED.format(2, "rank 1", 99))


@on_ranks(3)
def test_counts_follow_samples_into_their_micro_batches():
    rng, shuffler = np.random.default_rng(dist.get_rank()), TokenShuffler(max_tokens_per_micro_batch=20)
    wrong, count = [], 0
    for _ in range(4):
        loaded = draw_histories(rng, 4)
        plan = shuffler.plan(loaded)
        micro_batches = shuffler.micro_batches(shuffler.exchange(loaded, plan), plan)
        wrong += [name for one in micro_batches for name in wrong_counts_on_host(one)]
        count = max(count, len(micro_batches))
    assert not wrong and count > 1


def _counts_within_pairs(identity: bool) -> tuple[int, int, int]:
    """Returns the micro-batches that a plan of all ranks has, those of it here, and those of a plan alone."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    cap = {"max_tokens_per_micro_batch": 13}
    shuffler = IdentityShuffler(**cap) if identity else FieldShuffler(pairs[dist.get_rank() % 2], **cap)
    everyone = shuffler.plan_with(shuffler.planner.of_all_ranks(), lopsided_batch())
    plans = (everyone, everyone.within(np.array(shuffler.group.ranks)), shuffler.plan(lopsided_batch()))
    return tuple(plan.num_micro_batches for plan in plans)


@pytest.mark.parametrize("identity", [False, True])
def test_groups_of_ranks_have_as_many_micro_batches_as_the_largest_needs(pools, identity):
    results = pools(3).run(_counts_within_pairs, identity)
    assert len({everyone for everyone, *_ in results}) == 1
    assert all(here == everyone >= alone > 0 for everyone, here, alone in results)


def _micro_batches_where_rank_1_has_no_samples() -> list[int]:
    shuffler = IdentityShuffler(max_tokens_per_micro_batch=9)
    ids = KeyedJaggedTensor(["id"], torch.arange(12), lengths=torch.full((3,), 4))
    loaded = {"ids": ids} if dist.get_rank() == 0 else None
    everyone = shuffler.plan_with(shuffler.planner.of_all_ranks(), loaded)
    plan = everyone.within(np.array(shuffler.group.ranks))
    batch = shuffler.exchange(shuffler.batch_for_step(loaded, plan), plan)
    return [one["ids"].stride() for one in shuffler.micro_batches(batch, plan)]


def test_a_rank_without_samples_repeats_its_only_row_in_each_micro_batch(pools):
    with_samples, without = pools(2).run(_micro_batches_where_rank_1_has_no_samples)
    assert sum(with_samples) == 3 and without == [1] * len(with_samples) == [1, 1]


def test_no_step_compiles():
    settings = {"partitioner": "refined", "max_tokens_per_micro_batch": 100}
    before, after = before_and_after_placing(then="divide(plan, 100)", **settings)
    assert before == after and len(before) > 4
