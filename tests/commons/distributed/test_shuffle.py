"""Each sample of a step is computed once, bit for bit, on real processes."""

import dataclasses
import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed import BalanceReport, BatchShufflerFactory, ShufflePlan
from commons.sequence_batch import move_to
from tests.commons.distributed.container_batches import (
    KINDS,
    ContainerShuffler,
    check_shared,
    contents,
    make_batch,
)
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import BOTH, agreed, check_identical, lopsided_batch
from tests.commons.distributed.shufflers import Case, FieldShuffler, cases
from tests.drawn_batches import MixedBatch, draw_batch, sample_contents, tensors_of
from tests.few_examples import few_examples
from tests.on_ranks import on_ranks
from tests.process_pool import rank_device


@dataclass(frozen=True)
class Ran:
    """A step on one rank: its samples as loaded and as computed, rows and real rows, the plan."""

    loaded: list[tuple]
    computed: list[tuple]
    sizes: tuple[int, int]
    plan: ShufflePlan
    report: BalanceReport


def _planned_and_moved(
    case: Case, kind: str, exchange: str, group: dist.ProcessGroup | None
) -> tuple[Any, ShufflePlan, Any]:
    """Returns this rank's batch, the plan, and what came of the batch; None where no rank has one."""
    settings = case.settings | {"exchange": exchange}
    shuffler = (FieldShuffler if kind == "mixed" else ContainerShuffler)(group, **settings)
    if case.agreed_before:
        agreed(shuffler, case.labels) if kind == "mixed" else shuffler.shuffle(make_batch(kind, 0, 0, 2))
    rank = shuffler.group.rank
    if kind == "mixed":
        batch = case.loaded_by(rank)
    else:  # which has no padding
        sizes = case.batches[rank]
        batch = sizes and make_batch(kind, case.seed, 1000 * (rank + 1), max(sizes[1], 1))
    plan = shuffler.plan(batch)
    if not plan.has_batch:
        return batch, plan, None
    if kind != "mixed" and batch is not None:  # asked about the host batch, with integers that do not wrap
        check_identical(contents(shuffler.asked_about[-1]), contents(batch))
    brought = shuffler.padding_batch() if batch is None else batch
    moved = shuffler.exchange(move_to(brought, rank_device()), plan)
    check_shared(moved, brought)
    return batch, plan, moved


def _run(case: Case, kind: str, ranks: list[int] | None = None) -> Ran | str | None:
    """Runs a step with each exchange, or with one among these ranks; returns the error where no plan is."""
    group, exchanges = None, BOTH if ranks is None else [case.settings["exchange"]]
    if ranks is not None:
        others = [[rank] for rank in range(dist.get_world_size()) if rank not in ranks]
        group, _ = dist.new_subgroups_by_enumeration([ranks, *others])
        if dist.get_rank() not in ranks:
            FieldShuffler(group)
            return None
    try:
        steps = [_planned_and_moved(case, kind, exchange, group) for exchange in exchanges]
    except ValueError as error:
        return str(error)
    batch, plan, moved = steps[0]
    assert all(again == plan for _, again, _ in steps)
    if moved is None:
        return "no rank has a batch"
    for _, _, other in steps[1:]:
        check_identical(other, moved)
    rank = dist.get_group_rank(group, dist.get_rank()) if group else dist.get_rank()
    num_placed = int(plan.num_placed[rank])
    if kind == "mixed":
        _check_padding(moved, num_placed)
    return Ran(
        loaded=[] if batch is None else contents(batch),
        computed=contents(moved)[:num_placed],
        sizes=(moved.batch_size, moved.num_samples)
        if kind == "mixed"
        else (len(contents(moved)), num_placed),
        plan=plan,
        report=BalanceReport.of(plan, case.equal_rows),
    )


def _check_padding(moved: MixedBatch, num_placed: int) -> None:
    """Checks that padding rows are empty, or zero, and that each tensor is aligned."""
    assert not any(tensor.data_ptr() % 16 for tensor in tensors_of(moved))
    for name, value in moved.per_sample_fields().items():
        of_rows = value if isinstance(value, torch.Tensor) else value.lengths().view(-1, moved.batch_size).T
        assert not of_rows[num_placed:].any(), name


def _check(case: Case, kind: str, results: list[Ran | str]) -> None:
    max_tokens = case.settings.get("max_tokens")
    if isinstance(results[0], str):
        assert len(set(results)) == 1
        assert f"max_tokens={max_tokens}" in results[0] or set(case.batches) == {None}
        return
    plan = results[0].plan
    for ran in results:
        assert ran.plan == plan
    every = [content for ran in results for content in ran.loaded]
    assert kind != "mixed" or len(every) == case.num_real
    assert Counter(every) == Counter(content for ran in results for content in ran.computed)
    for ran, samples in zip(results, plan.partition, strict=True):
        assert ran.computed == [every[sample] for sample in samples]
    _check_sizes(case, kind, results)
    _check_loads(case, plan, results[0].report)


def _check_sizes(case: Case, kind: str, results: list[Ran]) -> None:
    sizes = [ran.sizes for ran in results]
    assert [real for _, real in sizes] == [len(ran.computed) for ran in results]
    if case.equal_rows:
        assert np.ptp([real for _, real in sizes]) <= 1
    if case.equal_rows and kind == "mixed":
        total = sum(of_rank[0] for of_rank in case.batches if of_rank is not None)
        assert {rows for rows, _ in sizes} == {max(-(-total // len(results)), 1)}
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


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@few_examples
@given(data=st.data(), kind=st.sampled_from(["mixed", "mixed", "mixed", *KINDS]))
def test_each_sample_is_computed_once_bit_for_bit(pools, num_ranks: int, data: Any, kind: str):
    case = data.draw(cases(num_ranks))
    _check(case, kind, pools(num_ranks).run(_run, case, kind))


@few_examples  # each makes process groups
@given(case=cases(2), ranks=st.sampled_from([[1, 3], [0, 3], [1, 2]]))
def test_a_subgroup_balances_among_its_own_ranks(pools, case: Case, ranks: list[int]):
    results = pools(4).run(_run, case, "mixed", ranks)
    assert [rank for rank, result in enumerate(results) if result is not None] == ranks
    _check(case, "mixed", [results[rank] for rank in ranks])


@on_ranks(2)
def test_the_order_of_ranks_in_a_group_does_not_matter():
    # Up to torch 2.11 every group is in order.
    can_keep_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    group = dist.new_group([1, 0], **{"sort_ranks": False} if can_keep_order else {})
    batch = lopsided_batch()
    moved, contents_of_ranks = FieldShuffler(group).shuffle(batch), [None, None]
    dist.all_gather_object(contents_of_ranks, (sample_contents(batch), sample_contents(moved)))
    loaded, computed = (Counter(content for of in contents_of_ranks for content in of[i]) for i in (0, 1))
    assert loaded == computed


@on_ranks(2)
def test_the_identity_moves_nothing():
    batch, shuffler = _small(3), BatchShufflerFactory.create("identity")
    plan = shuffler.plan(batch)
    assert shuffler.exchange(batch, plan).small is batch.small and plan.num_ranks == 1


def _small(real: int, rows: int = 4) -> MixedBatch:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return draw_batch(np.random.default_rng(rank), 0, rows, real)


def test_a_process_without_a_group_keeps_its_batches():
    shuffler, batch = ContainerShuffler(), make_batch("dict", 0, 0, 3)
    assert shuffler.shuffle(batch) is batch
    batch = _small(3)
    assert FieldShuffler().shuffle(batch).small is batch.small


@on_ranks(2)
def test_an_exchange_of_what_was_not_planned_is_refused():
    shuffler = agreed(FieldShuffler())
    batch = _small(3)
    other_dtype = dataclasses.replace(batch, small=batch.small.float())
    for planned, other, told in (
        (batch, _small(3, 5), "got a batch of 5 rows"),
        (batch, shuffler.padding_batch(), "got a batch of 1 rows"),
        (batch, other_dtype, "small"),
        (_small(4), draw_batch(np.random.default_rng(7), 0, 4, 4), ""),
    ):
        error = error_of(shuffler.exchange, other, shuffler.plan(planned))
        assert error.startswith("ValueError") and told in error, error
        assert "give exchange the batch that plan was made for" in error
