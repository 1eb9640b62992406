"""Cuts of samples: where they are, what pieces are, and how well ranks are balanced with them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commons.distributed import PARTITIONERS, ShufflerSettings
from commons.extensions.pieces import Pieces
from commons.extensions.pieces import cut_rules as of
from commons.partition import lower_bound
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.column_costs import (
    COSTS,
    SLOW_ATTENTION,
    planned_by_calibrated_cost,
    planned_by_one_column_and_two,
)
from tests.commons.distributed.compiled_kernels import compiled
from tests.commons.distributed.internals import RowTable
from tests.commons.distributed.shufflers import LIMITED
from tests.commons.extensions.pieces.cut_samples import (
    KINDS,
    batch_of,
    check_cut,
    check_pieces,
    flops,
    imbalance_of,
    loaded_by,
    placed,
)
from tests.commons.extensions.pieces.drawn_cuts import is_cut
from tests.commons.extensions.pieces.internals import MIN_TOKENS, Cutting, cut_and_place
from tests.commons.histories import drawn_lengths
from tests.process_pool import ProcessPool


def _drawn(seed: int, kind: str, rows: int, num_ranks: int) -> tuple[BaseBatch, RowTable, Cutting]:
    batch = batch_of(kind, drawn_lengths(np.random.default_rng(seed), rows * num_ranks))
    return batch, *loaded_by([rows] * num_ranks, batch)


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    partitioner=st.sampled_from(sorted(PARTITIONERS)),
    num_ranks=st.integers(2, 12),
    rows=st.sampled_from([2, 8, 32]),
    slack=st.sampled_from([None, 1.15, 1.5]),
)
@example(seed=631, kind="history", partitioner="refined", num_ranks=11, rows=2, slack=None)  # for its tokens
@example(seed=130, kind="ahead", partitioner="longest_processing_time", num_ranks=5, rows=2, slack=1.15)
def test_pieces_are_those_of_the_batch_balance_it_and_keep_to_max_tokens(
    seed, kind, partitioner, num_ranks, rows, slack
):
    batch, samples, cutting = _drawn(seed, kind, rows, num_ranks)
    options = {"partitioner": partitioner}
    if slack is not None and partitioner in LIMITED:
        options["max_tokens"] = int(samples.tokens.sum() / num_ranks * slack) + 4 * MIN_TOKENS
    plan = placed(samples, cutting, **options)
    assert not any(array.flags.writeable for array in plan.rows.arrays())
    if "max_tokens" in options:
        assert np.bincount(plan.destination, plan.rows.tokens).max() <= options["max_tokens"]
    elif lower_bound(samples.workloads, num_ranks, equal_size=False) <= 1.01:
        assert plan == placed(samples, None, partitioner=partitioner)
    elif samples.tokens.sum() >= 2000 * num_ranks:  # or pieces would be too short
        assert imbalance_of(plan) <= 1.01
    if is_cut(plan):
        check_pieces(plan, samples, cutting)
        check_cut(batch, plan, cutting)


@pytest.mark.parametrize("partitioner", ["rebalance", "refined", "longest_processing_time"])
@given(
    seed=st.integers(0, 10**6),
    num_ranks=st.integers(2, 8),
    slow=st.just(1.0) | st.floats(0.4, 0.9),
    fast=st.sampled_from([1.0, 1.3]),
)
def test_pieces_follow_the_speeds_of_ranks_and_equal_ones_cut_no_more(
    partitioner, seed, num_ranks, slow, fast
):
    _, samples, cutting = _drawn(seed, "history", 16, num_ranks)
    speeds = fast * np.where(np.arange(num_ranks) == 1, slow, 1.0)
    plan = placed(replace(samples, speeds=speeds), cutting, partitioner=partitioner)
    if slow == 1:
        whole = placed(samples, cutting, partitioner=partitioner)
        assert np.array_equal(plan.destination, whole.destination)
    elif partitioner != "longest_processing_time":
        ideal = plan.rows.workloads.sum() / speeds.sum()
        bound = lower_bound(samples.workloads, num_ranks, equal_size=False, speeds=speeds)
        assert (plan.loads / speeds).max() <= 1.05 * ideal * (1 if is_cut(plan) else bound)


@pytest.mark.parametrize("partitioner", LIMITED)
def test_max_tokens_gives_a_rank_an_early_and_a_late_piece(partitioner):
    samples, cutting = loaded_by([1, 0], batch_of("history", np.array([5000])))
    plan = placed(samples, cutting, partitioner=partitioner, max_tokens=5600)
    assert np.bincount(plan.destination, plan.rows.tokens).max() <= 5600
    assert imbalance_of(plan) <= 1.01
    assert len(plan.rows.workloads) == 3


def test_rebalancing_with_pieces_moves_few_samples_and_keeps_its_tolerance():
    rng = np.random.default_rng(0)
    lengths = rng.integers(80, 120, 256)
    lengths[5] = 1200
    samples, cutting = loaded_by([32] * 8, batch_of("history", lengths))
    moved = {}
    for partitioner, tolerance in (("refined", None), ("rebalance", None), ("rebalance", 0.1)):
        plan = placed(samples, cutting, partitioner=partitioner, tolerance=tolerance)
        assert imbalance_of(plan) <= 1 + (tolerance or 0.01)
        moved[partitioner, tolerance] = (plan.rows.home != plan.destination).sum()
    assert moved["rebalance", 0.1] <= moved["rebalance", None] < moved["refined", None] / 2


@pytest.mark.parametrize("partitioner", ["refined", "rebalance"])
def test_tokens_of_pieces_are_evened_out_at_no_cost_in_load(partitioner):
    fewer = 0
    for seed in range(12):
        lengths = np.random.default_rng(seed).lognormal(5, 1.4, 128).clip(1, 4096).astype(np.int64)
        samples, cutting = loaded_by([16] * 8, batch_of("history", lengths))
        plans = [
            placed(samples, cutting, partitioner=partitioner, token_tolerance=each) for each in (None, 0.1)
        ]
        loads = [plan.loads.max() for plan in plans]
        tokens = [np.bincount(plan.destination, plan.rows.tokens).max() for plan in plans]
        if is_cut(plans[0]):
            assert loads[1] <= loads[0] and tokens[1] <= tokens[0]
            fewer += tokens[1] < tokens[0]
    assert fewer >= 6


def _plan() -> str:
    _, samples, cutting = _drawn(0, "history", 32, 16)
    return repr([array.tolist() for array in placed(samples, cutting).arrays()])


def test_all_processes_cut_alike(pools):
    assert len({_plan(), _plan(), *pools(2).run(_plan)}) == 1


def test_few_samples_are_cut_as_far_as_pieces_are_of_use():
    for lengths, num_ranks, most in (
        ([10_000], 64, 1.02),
        ([10_000, 1, 1], 7, 1.01),
        ([3000, 3000, 3000], 2, 1.01),
        ([20], 64, np.inf),
    ):
        batch = batch_of("history", np.array(lengths))
        samples, cutting = loaded_by([len(lengths)] + [0] * (num_ranks - 1), batch)
        plan = placed(samples, cutting)
        assert imbalance_of(plan) <= most
        assert is_cut(plan) == (most < np.inf)
        if most < np.inf:
            check_pieces(plan, samples, cutting)


def test_samples_without_cost_stay_whole_and_a_cost_that_decreases_is_named():
    samples, cutting = loaded_by([3, 2], batch_of("history", np.array([500, 9, 9, 9, 9])))
    free = replace(samples, workloads=0 * samples.workloads, work=0 * samples.work)
    assert not is_cut(placed(free, cutting))
    doubled = replace(cutting, prefix_cost=lambda tokens, counts: 2 * flops(tokens, counts))
    with pytest.raises(ValueError, match="prefix_cost decreases"):
        doubled.cut(samples, np.array([0]), np.array([400]))
    with pytest.raises(ValueError, match="cut 0 of sample 0 is after 500 items; expected 1 to 499"):
        cutting.cut(samples, np.array([0]), np.array([500]))


def _compiled_before_and_after_cutting() -> tuple[list[str], list[str]]:
    before = compiled()
    for ranks, lengths in (([9, 0], [3000] + [200] * 8), ([3, 0], [200] * 3)):
        samples, cutting = loaded_by(ranks, batch_of("history", np.array(lengths)))
        assert is_cut(placed(samples, cutting))
    return before, compiled()


def test_nothing_is_compiled_after_the_warm_up():
    pool = ProcessPool(1)  # a new process, in which warm_up has run and nothing else
    ((before, after),) = pool.run(_compiled_before_and_after_cutting)
    pool.close()
    assert before == after and "_level" in before


def test_columns_that_add_up_to_one_are_cut_as_it_is(pools):
    for plans in pools(3).run(planned_by_one_column_and_two, {"equal_rows": False}, [Pieces]):
        assert sum(is_cut(plan) for plan in plans) >= 6


@pytest.mark.parametrize("cost", COSTS)
def test_pieces_level_the_costs_that_were_calibrated(pools, cost):
    for plans in pools(3).run(planned_by_calibrated_cost, cost, [Pieces]):
        largest = [imbalance_of(plan) for plan in plans if is_cut(plan)]
        assert len(largest) >= (3 if cost is SLOW_ATTENTION else 0)
        assert max(largest, default=1) <= 1.02


def test_what_is_kept_together_limits_no_other_piece():
    history, candidates = np.array([1900, 200, 200, 200]), np.array([1100, 10, 10, 10])
    tokens, each = history + candidates, np.ones(4, dtype=np.int64)
    rules = of.CutRules(
        items=(of.ItemGroup("history"), of.ItemGroup("candidates")),
        fields={"history": of.ALONG_ITEMS, "candidates": of.FROM_END, "loss_tokens": of.FROM_END},
        kept_together="candidates",
    )
    counts, none = {"history": history, "candidates": candidates}, np.zeros((4, 0), dtype=np.int64)
    samples = RowTable(each, each, tokens**2, tokens, candidates, none, 8 * tokens, columns=counts)
    cutting = Cutting(rules, None, ("history", "candidates"), lambda before, _: before.astype(np.int64) ** 2)
    for cap in (1600, 1300, 1100):
        made, rank = cut_and_place(samples, ShufflerSettings(equal_rows=False, max_tokens=cap), cutting)
        assert np.bincount(rank, made.tokens).max() <= cap and made.tokens.sum() == tokens.sum()
    with pytest.raises(ValueError, match="a piece of row 0 of rank 0 has 1100 tokens"):
        cut_and_place(samples, ShufflerSettings(equal_rows=False, max_tokens=1099), cutting)
