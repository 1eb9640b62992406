"""No sample is lost, doubled or torn apart, on real processes."""

from __future__ import annotations

import inspect
import re
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.distributed import BalanceReport, BatchShufflerFactory, ShufflePlan
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import Case, FieldShuffler, cases, planned
from tests.drawn_batches import MixedBatch, draw_batch, sample_contents

NOTHING = "no rank has a batch"


@dataclass(frozen=True)
class Ran:
    """A step on one rank: its samples as loaded and as computed, rows and real rows, the plan."""

    loaded: list[tuple]
    computed: list[tuple]
    sizes: tuple[int, int]
    plan: ShufflePlan
    fingerprint: int
    report: BalanceReport


def _run(case: Case, ranks: list[int] | None = None) -> Ran | str | None:
    """Runs a step; with `ranks`, among these alone. Returns the error where no plan is."""
    group = None
    if ranks is not None:
        others = [[rank] for rank in range(dist.get_world_size()) if rank not in ranks]
        group, _ = dist.new_subgroups_by_enumeration([ranks, *others])
        if dist.get_rank() not in ranks:
            FieldShuffler(group)
            return None
    try:
        shuffler, batch, plan = planned(case, group)
    except ValueError as error:
        return str(error)
    if not plan.has_batch:
        return NOTHING
    brought = shuffler.padding_batch() if batch is None else batch
    assert brought.num_samples == plan.rows.num_loaded[shuffler.group.rank]
    moved = shuffler.exchange(brought, plan)
    assert torch.equal(moved.shared, torch.tensor([1.0, 2.0]))
    return Ran(
        loaded=[] if batch is None else sample_contents(batch),
        computed=sample_contents(moved),
        sizes=(moved.batch_size, moved.num_samples),
        plan=plan,
        fingerprint=plan.fingerprint,
        report=BalanceReport.of(plan, case.equal_rows),
    )


def _check(case: Case, results: list[Ran | str]) -> None:
    max_tokens = case.settings.get("max_tokens")
    if isinstance(results[0], str):
        assert len(set(results)) == 1
        assert f"max_tokens={max_tokens}" in results[0] or set(case.batches) == {None}
        return
    plan = results[0].plan
    for ran in results:
        assert (ran.plan, ran.fingerprint) == (plan, results[0].fingerprint)
    before = Counter(content for ran in results for content in ran.loaded)
    assert before == Counter(content for ran in results for content in ran.computed)
    assert sum(before.values()) == case.num_real
    _check_sizes(case, results)
    _check_loads(case, plan, results[0].report)


def _check_sizes(case: Case, results: list[Ran]) -> None:
    sizes = [ran.sizes for ran in results]
    assert [real for _, real in sizes] == [len(ran.computed) for ran in results]
    if case.equal_rows:
        total = sum(of_rank[0] for of_rank in case.batches if of_rank is not None)
        assert {rows for rows, _ in sizes} == {max(-(-total // len(results)), 1)}
        assert np.ptp([real for _, real in sizes]) <= 1
    else:
        assert all(rows == max(real, 1) for rows, real in sizes)


def _check_loads(case: Case, plan: ShufflePlan, report: BalanceReport) -> None:
    """Checks loads and tokens, and that the report has them."""
    max_tokens = case.settings.get("max_tokens")
    before, after = (
        np.bincount(rank_of, plan.rows.workloads, minlength=plan.num_ranks)
        for rank_of in (plan.rows.home, plan.destination)
    )
    assert np.array_equal(report.loads_after, after)
    if max_tokens is not None:
        assert report.tokens_after.max() <= max_tokens
    elif not case.equal_rows or np.ptp(plan.rows.num_loaded) <= 1:
        assert after.max() <= before.max()  # never worse than as loaded


@settings(max_examples=50, deadline=None)
@given(case=st.sampled_from([2, 3, 3, 3, 3, 4]).flatmap(cases))
def test_every_sample_is_computed_once(pools, case):
    _check(case, pools(len(case.batches)).run(_run, case))


@settings(max_examples=6, deadline=None)
@given(case=cases(2), ranks=st.sampled_from([[1, 3], [0, 3], [1, 2]]))
def test_a_subgroup_balances_among_its_own_ranks(pools, case, ranks):
    results = pools(4).run(_run, case, ranks)
    assert [rank for rank, result in enumerate(results) if result is not None] == ranks
    _check(case, [results[rank] for rank in ranks])


def _shuffle_in_a_group_of_another_order() -> tuple[list, list]:
    # Up to torch 2.11 every group is in order.
    can_keep_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    group = dist.new_group([1, 0], **{"sort_ranks": False} if can_keep_order else {})
    batch = draw_batch(np.random.default_rng(dist.get_rank()), 100 * dist.get_rank(), 4, 3)
    return sample_contents(batch), sample_contents(FieldShuffler(group).shuffle(batch))


def test_the_order_of_ranks_in_a_group_does_not_matter(pools):
    results = pools(2).run(_shuffle_in_a_group_of_another_order)
    before, after = (Counter(content for result in results for content in result[i]) for i in (0, 1))
    assert before == after


def _balance_among_others() -> str:
    # Both ranks name the group of rank 0 alone.
    return error_of(FieldShuffler, dist.new_group([0]))


def test_a_group_without_this_rank_is_refused_on_all(pools):
    errors = pools(2).run(_balance_among_others)
    assert errors == errors[:1] * 2
    assert errors[0].startswith("ValueError: rank 1 is not in the process_group")


def _identity() -> bool:
    batch = draw_batch(np.random.default_rng(dist.get_rank()), 0, 4, 3)
    shuffler = BatchShufflerFactory.create("identity")
    plan = shuffler.plan(batch)
    return shuffler.exchange(batch, plan) is batch and plan.num_ranks == 1


def test_identity_moves_nothing(pools):
    assert all(pools(2).run(_identity))


def test_a_process_without_a_group_keeps_its_batches():
    batch, shuffler = draw_batch(np.random.default_rng(0), 0, 4, 3), FieldShuffler()
    plan = shuffler.plan(batch)
    assert shuffler.exchange(batch, plan) is batch


class BadShuffler(FieldShuffler):
    """On rank 1, returns or raises what it is told to; good workloads elsewhere."""

    def __init__(self, workloads: Any) -> None:
        super().__init__()
        self.workloads = workloads

    def get_workloads(self, batch):
        if dist.get_rank() != 1:
            return batch.workload
        if isinstance(self.workloads, Exception):
            raise self.workloads
        return self.workloads


BAD_WORKLOADS = [
    (torch.arange(4), r"ValueError: BadShuffler.get_workloads returned shape \(4,\), .*: \(3,\)"),
    (torch.tensor([1, -5, 2]), "ValueError: BadShuffler.get_workloads returned -5 for row 1"),
    (torch.tensor([1, 2, float("nan")]), "ValueError: BadShuffler.get_workloads returned nan for row 2"),
    (torch.tensor([float("inf"), 2, 1]), "ValueError: BadShuffler.get_workloads returned inf for row 0"),
    (LookupError("no such table"), "LookupError: no such table"),
    (StopIteration("odd"), r"RuntimeError: BadShuffler.get_workloads raised StopIteration\('odd'\)"),
    (torch.tensor([0.25, 1.0, 2.0]), "ValueError: BadShuffler.get_workloads returned 0.25 for row 0"),
    (None, "ValueError: BadShuffler.get_workloads returned NoneType, expected integers"),
    (torch.zeros(3).cfloat(), "ValueError: BadShuffler.get_workloads returned torch.complex64"),
]


def _errors_of_bad_workloads() -> list[str]:
    """Returns the errors in the first step of a shuffler, and in its second."""
    batch = draw_batch(np.random.default_rng(1), 0, 3, 3)
    first = [error_of(BadShuffler(workloads).plan, batch) for workloads, _ in BAD_WORKLOADS]
    shuffler = BadShuffler(torch.arange(3))
    shuffler.plan(batch)
    for workloads, _ in BAD_WORKLOADS:
        shuffler.workloads = workloads
        first.append(error_of(shuffler.plan, batch))
    return [error.partition("\n")[0] for error in first]


def test_bad_workloads_of_one_rank_are_the_same_error_on_all(pools):
    errors, elsewhere = pools(2).run(_errors_of_bad_workloads)
    assert errors == elsewhere
    for error, (_, expected) in zip(errors, BAD_WORKLOADS * 2, strict=True):
        assert re.search(expected, error)


def _traceback_of_bad_workloads() -> str:
    shuffler = BadShuffler(LookupError("no such table"))
    with pytest.raises(LookupError) as error:
        shuffler.plan(draw_batch(np.random.default_rng(1), 0, 3, 3))
    return "".join(traceback.format_exception(error.value))


def test_every_rank_sees_where_the_error_was_raised(pools):
    elsewhere, here = pools(2).run(_traceback_of_bad_workloads)
    assert "in get_workloads" in here
    assert "in get_workloads" in elsewhere and "raised on rank 1:" in elsewhere


def _changed(batch: MixedBatch, change: str) -> MixedBatch:
    features = batch.features
    keys = type(features)(["a", "b", "z"], features.values(), lengths=features.lengths())
    name, value = {
        "dtype": ("small", batch.small.float()),
        "field": ("flags", None),
        "keys": ("features", keys),
    }[change]
    setattr(batch, name, value)
    return batch


def _errors_of_other_fields() -> list[str]:
    errors = []
    for change in CHANGES:
        for at_step in (0, 2):
            shuffler = FieldShuffler()
            batches = [draw_batch(np.random.default_rng(step), 0, 3, 3) for step in range(at_step + 1)]
            for batch in batches[:-1]:
                shuffler.shuffle(batch)
            last = _changed(batches[-1], change) if dist.get_rank() == 1 else batches[-1]
            errors.append(error_of(shuffler.shuffle, last).partition("\n")[0])  # without where it was raised
    return errors


CHANGES = {
    "dtype": "field 'small' has dtype torch.float32, expected torch.float16",
    "field": "field 'flags' is missing",
    "keys": "field 'features' has keys ('a', 'b', 'z'), expected ('a', 'b', 'c')",
}


def test_batches_that_differ_are_the_same_error_on_all_ranks(pools):
    errors, *elsewhere = pools(3).run(_errors_of_other_fields)
    assert elsewhere == [errors] * 2
    for error, expected in zip(errors, np.repeat(list(CHANGES.values()), 2), strict=True):
        assert error.startswith("ValueError: rank 1 has a batch that differs") and expected in error


def _first_batch_missing_on_rank_0() -> int:
    shuffler = FieldShuffler()
    empty = shuffler.plan(None)
    assert not empty.has_batch
    batch = None if dist.get_rank() == 0 else draw_batch(np.random.default_rng(5), 0, 4, 4)
    plan = shuffler.plan(batch)
    return shuffler.exchange(batch or shuffler.padding_batch(), plan).num_samples


def test_a_rank_without_any_batch_takes_part(pools):
    assert pools(2).run(_first_batch_missing_on_rank_0) == [2, 2]


def test_a_plan_of_another_shuffler_is_not_followed_in_silence():
    batch, planned_by, other = draw_batch(np.random.default_rng(0), 0, 4, 3), FieldShuffler(), FieldShuffler()
    with pytest.raises(RuntimeError, match="no rank of the group has had a batch yet"):
        other.exchange(batch, planned_by.plan(batch))
