"""Placement of samples for padded models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.padded import Padded
from commons.extensions.padded.padded_plan import plan_padded
from commons.extensions.pieces import Pieces
from commons.extensions.sample_groups import SampleGroups
from commons.perf_model import Cost, HSTUFlops
from hstu.batch_shuffler import HSTUBatchShuffler
from tests.commons.distributed.compiled_kernels import before_and_after_placing
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all, warnings_of
from tests.commons.extensions.padded.padded_rows import costs, draw_table, table
from tests.commons.histories import TokenShuffler, histories
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("num_columns", [1, 3])
def test_plans_are_never_above_as_loaded_and_keep_their_limits(num_columns):
    rng, moved = np.random.default_rng(3), 0
    for number in range(700):
        rows = draw_table(rng, num_columns, ranks_per_node=[None, 2][number % 2])
        limits = [None, int(rng.integers(2, 9)), None][number % 3], [None, None, 1.2][number % 3]
        if (max_rows := limits[0]) is not None:
            max_rows = max(max_rows, int(rows.batch_sizes.max()))  # as loaded is allowed
        plan = plan_padded(rows, None, max_rows, limits[1])
        before = costs(rows, rows.home, rows.batch_sizes)
        after = costs(rows, plan.destination, plan.num_rows * (plan.num_placed > 0))
        assert np.array_equal(plan.loads_before, before) and np.array_equal(plan.loads, after)
        assert plan.rank_loads.least <= after.max() <= before.max()
        padded = [
            costs(rows, rank_of, num_rows, rows.tokens[:, None]).max()
            for rank_of, num_rows in ((rows.home, rows.batch_sizes), (plan.destination, plan.num_placed))
        ]
        assert padded[1] <= padded[0] or plan.num_placed[padded[1] == padded[0]].max(initial=0) <= 1
        assert max_rows is None or not plan.moves or plan.num_placed.max() <= max_rows
        assert plan.num_placed.all() or len(rows.tokens) < rows.num_ranks or not plan.moves
        moved += plan.moves
    assert moved > 500


def test_a_padded_plan_is_reported_relative_to_work_without_padding():
    rows = table(np.array([[9], [3], [3], [8], [3], [2]]), np.array([3, 3]), padding=1)
    plan = plan_padded(rows)
    report = BalanceReport.of(plan, False)
    assert plan.destination.tolist() == [0, 1, 1, 0, 1, 1] and plan.num_rows.tolist() == [2, 4]
    assert report.loads_before.tolist() == [4 * 9, 4 * 8] and report.loads_after.tolist() == [2 * 9, 4 * 3]
    assert report.imbalance_before == pytest.approx(36 / 14) and report.imbalance_after == 18 / 14
    assert report.lower_bound == report.imbalance_after
    loads = plan.rank_loads
    assert (loads.padding_before, loads.padding_after) == (68 / 28, 30 / 28)
    stays = plan_padded(rows, exchanges=False)
    assert not stays.moves and np.array_equal(stays.loads, plan.loads_before)
    assert stays.rank_loads.least == 18


def test_limits_that_loaded_batches_exceed_are_met_or_refused():
    rows = table(np.array([[9], [2], [2], [2], [1], [1]]), np.array([3, 3]))
    plan = plan_padded(rows, max_tokens=10)
    assert costs(rows, plan.destination, plan.num_placed).max() <= 10
    assert np.ptp(plan_padded(rows, max_rows=3).num_placed) == 0
    error = error_of(plan_padded, rows, max_tokens=9)
    assert "the longest of 9 tokens, on 2 ranks" in error and "max_tokens=9" in error
    assert "max_rows=2" in error_of(plan_padded, rows, max_rows=2)
    assert "row 0 of rank 0 has 9 tokens, above max_tokens=8" in error_of(plan_padded, rows, max_tokens=8)


def test_max_tokens_is_met_wherever_it_can_be():
    """Rows without loss tokens, or tokens unrelated to work, stand in the way of runs sorted by work."""
    work = np.array([[4], [2], [8], [3], [12]])
    rows = table(work, np.array([2, 2, 1]), loss_tokens=np.array([0, 0, 1, 0, 1]))
    odd = table(
        np.array([[29], [3], [10], [11], [18]]), np.array([1, 4]), loss_tokens=np.array([0, 1, 1, 1, 0])
    )
    odd = replace(odd, tokens=np.array([8, 20, 11, 6, 27]))
    for each, most in ((rows, 12), (odd, 54)):
        plan = plan_padded(each, max_tokens=most)
        assert costs(each, plan.destination, plan.num_placed, each.tokens[:, None]).max() <= most


def test_a_row_with_loss_tokens_does_not_keep_all_rows_at_home():
    loss_tokens = np.array([0, 0, 0, 1, 1, 0, 1])
    rows = table(np.array([[2], [8], [3], [4], [5], [10], [1]]), np.array([3, 4]), loss_tokens=loss_tokens)
    assert plan_padded(rows).loads.max() < plan_padded(rows).loads_before.max()


def test_a_limit_on_real_tokens_gives_way_only_where_it_must():
    rng = np.random.default_rng(4)
    for _ in range(100):
        num_ranks = int(rng.integers(2, 9))
        work = rng.integers(1, 200, (16 * num_ranks, 1))
        rows = table(work, np.full(num_ranks, 16))
        free, limited = plan_padded(rows), plan_padded(rows, max_real_tokens=1.25)
        most = [np.bincount(plan.destination, rows.tokens).max() for plan in (free, limited)]
        mean = work.sum() / num_ranks
        assert most[1] <= max(1.25 * mean, work.max()) and limited.loads.max() >= free.loads.max()
    giant = table(np.array([[100], [1], [1], [1]]), np.array([2, 2]))
    assert plan_padded(giant, max_real_tokens=1.0).loads.max() == 100


def test_runs_of_samples_without_loss_tokens_get_some():
    """In next-item training, a sample of one item has nothing to predict."""
    rng = np.random.default_rng(5)
    for _ in range(100):
        num_ranks = int(rng.integers(2, 17))
        work = np.maximum(rng.geometric(0.3, (32 * num_ranks, 1)), 1)
        rows = table(work, np.full(num_ranks, 32), loss_tokens=work[:, 0] - 1)
        plan = plan_padded(rows)
        assert np.bincount(plan.destination, rows.loss_tokens, num_ranks).all()
        assert plan.loads.max() < plan.loads_before.max()


def test_micro_batches_are_runs():
    rng, better = np.random.default_rng(6), []
    for _ in range(200):
        rows = draw_table(rng, arguments={"micro_batch_tokens": 40})
        moved, stays = plan_padded(rows), plan_padded(rows, exchanges=False)
        assert np.array_equal(moved.loads_before, stays.loads) and not stays.moves
        better.append(stays.loads.max() / max(moved.loads.max(), 1))
        for plan in (moved, stays):
            slots = plan.destination * plan.num_parts + plan.rows.columns["micro_batch"]
            sizes, total = np.bincount(slots), np.zeros(rows.num_ranks)
            for slot in np.flatnonzero(sizes):
                cost = sizes[slot] * rows.tokens[slots == slot].max()
                assert cost <= 40 or sizes[slot] == 1
                total[slot // plan.num_parts] += cost
            assert np.array_equal(total, plan.loads)
    assert min(better) >= 1 and np.mean(better) > 1.2


@on_ranks(2)
def test_wrong_uses_are_refused():
    for settings, parts in (
        ({}, ("equal_rows=True", "Padded needs equal_rows=False")),
        ({"extensions": [Padded(), Pieces()]}, ("padded excludes pieces",)),
        ({"extensions": [Padded(), SampleGroups("user")]}, ("padded excludes sample_groups",)),
        ({"extensions": [Padded(), LearnedCosts()]}, ("padded excludes learned_costs",)),
        ({"cost": Cost.sum_of_columns(1)}, ("Padded excludes cost", "rows × longest")),
    ):
        given = {"extensions": [Padded()], "equal_rows": not settings, **settings}
        error = error_of_all(lambda given=given: TokenShuffler(**given))
        assert all(part in error for part in parts), error
    flops = HSTUFlops(1, 8, 2, 4)
    error = error_of_all(lambda: HSTUBatchShuffler(flops, extensions=[Padded()], equal_rows=False))
    assert "HSTUBatchShuffler excludes padded" in error
    for arguments in ({"max_rows": 0}, {"max_real_tokens": 0.5}):
        assert "at least 1" in error_of(Padded, **arguments)


@on_ranks(2)
def test_settings_without_effect_are_named_once():
    with warnings_of("commons.extensions.padded.padded") as messages:
        for _ in range(2):
            TokenShuffler(extensions=[Padded()], equal_rows=False, token_tolerance=0.2, partitioner="refined")
        TokenShuffler(extensions=[Padded()], equal_rows=False)
    assert len(messages) == (dist.get_rank() == 0)
    assert all("partitioner, token_tolerance" in message for message in messages)


class PaddedByTheLoader(TokenShuffler):
    def get_workloads(self, batch):
        return batch.labels.lengths().long() + 1

    def get_tokens(self, batch):
        return torch.full((batch.batch_size,), 50)


@on_ranks(2)
def test_tokens_that_count_the_padding_of_the_loader_are_named_once():
    with warnings_of("commons.extensions.padded.padded") as messages:
        for shuffler in (PaddedByTheLoader, TokenShuffler):
            for _ in range(2):
                shuffler(extensions=[Padded()], equal_rows=False).plan(histories([9, 3, 3]))
    assert len(messages) == (dist.get_rank() == 0)
    assert all("all rows of a step have equally many tokens" in message for message in messages)


@on_ranks(2)
def test_a_shuffler_moves_samples_by_runs():
    lengths = [[9, 3, 3], [8, 3, 2]][dist.get_rank()]
    shuffler = TokenShuffler(extensions=[Padded()], equal_rows=False)
    batch = histories(lengths)
    plan = shuffler.plan(batch)
    items = shuffler.exchange(batch, plan).features["item"].lengths().tolist()
    assert sorted(items) == [[8, 9], [2, 3, 3, 3]][dist.get_rank()]
    apart = TokenShuffler(extensions=[Padded(), MicroBatches(max_tokens=60)], equal_rows=False)
    plan = apart.plan(batch)
    assert plan.num_parts == 1 and apart.extensions[0].report(plan)["micro_batches"] == 1


def test_no_step_compiles():
    setup = (
        "from commons.extensions.padded import Padded; from commons.extensions.padded.padded_plan import "
        "plan_padded; extensions = [Padded()]"
    )
    before, after = before_and_after_placing(setup, then="plan_padded(samples)", equal_rows=False)
    assert before == after and "cut_into_runs" in before
