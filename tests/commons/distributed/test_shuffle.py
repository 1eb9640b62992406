"""Nothing lost, nothing doubled, everything of a sample still together, on real processes."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.distributed.exchange import EXCHANGES
from commons.distributed.rank_group import RankGroup
from commons.distributed.shuffler_settings import PARTITIONERS
from tests.drawn_batches import draw_batch, sample_contents


class FieldShuffler(BatchShuffler):
    """The workload is a field of the batch."""

    def get_workloads(self, batch):
        return batch.workload


class QuickShuffler(FieldShuffler):
    """Shares its process groups with the others in this process: making them takes longer than a step."""

    def _make_group(self, process_group):
        if process_group is not None:
            return super()._make_group(process_group)
        return _group_of_all(self.settings.verify)


@functools.cache
def _group_of_all(verify: bool) -> RankGroup:
    return RankGroup.of(None, verify)


@dataclass(frozen=True)
class Case:
    """One global batch: rows and real rows per rank; rows None for a rank whose loader has ended."""

    seed: int
    labels: str
    equal_rows: bool
    partitioner: str
    exchange: str
    rows: tuple[tuple[int, int] | None, ...]


@st.composite
def cases(draw, num_ranks: int):
    kind = draw(st.sampled_from(["complete", "incomplete", "one rank empty", "uneven", "one rank ended"]))
    batch_size = draw(st.integers(1, 6))
    rows = [(batch_size, batch_size)] * num_ranks
    if kind == "incomplete":
        rows = [(batch_size, draw(st.integers(0, batch_size))) for _ in rows]
    elif kind == "uneven":
        sizes = [draw(st.integers(1, 8)) for _ in rows]
        rows = [(size, draw(st.integers(0, size))) for size in sizes]
    elif kind == "one rank empty":
        rows[draw(st.integers(0, num_ranks - 1))] = (batch_size, 0)
    elif kind == "one rank ended":
        rows[draw(st.integers(0, num_ranks - 1))] = None
    return Case(
        seed=draw(st.integers(0, 10**6)),
        labels=draw(st.sampled_from(["keyed", "dense", "flat", "none"])),
        equal_rows=draw(st.booleans()),
        partitioner=draw(st.sampled_from(sorted(PARTITIONERS))),
        exchange=draw(st.sampled_from(sorted(EXCHANGES))),
        rows=tuple(rows),
    )


def _shuffle(case: Case, ranks: list[int] | None = None):
    """On one rank: what it had, what it got, and the plan; with `ranks`, among these ranks only."""
    rank, group = dist.get_rank(), None
    if ranks is not None:
        group = dist.new_group(ranks)
        if rank not in ranks:
            return None
        rank = ranks.index(rank)
    shuffler = QuickShuffler(
        group,
        equal_rows=case.equal_rows,
        partitioner=case.partitioner,
        exchange=case.exchange,
        verify=True,
    )
    # The first step agrees on the fields; the case itself then is a step like any other.
    rng = np.random.default_rng((case.seed, rank))
    shuffler.shuffle(draw_batch(rng, 0, 1, 1, case.labels))
    mine = case.rows[rank]
    batch = None if mine is None else draw_batch(rng, 1000 * (rank + 1), *mine, case.labels)
    plan = shuffler.plan(batch)
    shuffled = shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)
    assert torch.equal(shuffled.shared, torch.tensor([1.0, 2.0]))
    before = [] if batch is None else sample_contents(batch)
    return before, sample_contents(shuffled), (shuffled.batch_size, shuffled.actual_batch_size), plan


def _check(case: Case, results) -> None:
    before = Counter(content for result in results for content in result[0])
    after = Counter(content for result in results for content in result[1])
    assert before == after
    assert sum(before.values()) == sum(real for rows in case.rows if rows for real in [rows[1]])
    sizes = [result[2] for result in results]
    assert [size[1] for size in sizes] == [len(result[1]) for result in results]
    assert all(plan == results[0][3] for *_, plan in results)
    plan = results[0][3]
    loads = [
        [plan.workloads[rank_of == rank].sum() for rank in range(len(results))]
        for rank_of in (plan.home, plan.destination)
    ]
    if not case.equal_rows or np.ptp(plan.num_loaded) <= 1:
        assert max(loads[1]) <= max(loads[0])  # never worse than as loaded
    counts = [real for _, real in sizes]
    if case.equal_rows:
        assert max(counts) - min(counts) <= 1
        total_rows = sum(rows[0] for rows in case.rows if rows)
        assert {rows for rows, _ in sizes} == {max(-(-total_rows // len(results)), 1)}
    else:
        assert [rows for rows, _ in sizes] == [max(real, 1) for real in counts]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_samples_are_conserved_whole(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=40, deadline=None)
    @given(case=cases(num_ranks))
    def conserved(case):
        _check(case, pool.run(_shuffle, case))

    conserved()


@settings(max_examples=15, deadline=None)
@given(case=cases(2), ranks=st.sampled_from([[1, 3], [0, 3], [1, 2]]))
def test_a_subgroup_balances_among_its_ranks_only(pools, case, ranks):
    results = pools(4).run(_shuffle, case, ranks)
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


def _exchange_of_another_batch() -> str:
    shuffler = FieldShuffler()
    rng = np.random.default_rng(dist.get_rank())
    plan = shuffler.plan(draw_batch(rng, 0, 4, 4))
    with pytest.raises(ValueError) as error:
        shuffler.exchange(draw_batch(rng, 0, 4, 4), plan)
    return str(error.value)


def test_exchanging_another_batch_than_the_planned_one_is_refused(pools):
    for error in pools(2).run(_exchange_of_another_batch):
        assert "give exchange the batch that plan was made for" in error


def _balance_among_others() -> str:
    # Every rank names the group of rank 0 alone.
    group = dist.new_group([0], use_local_synchronization=True) if dist.get_rank() == 0 else None
    if group is None:
        group = dist.GroupMember.NON_GROUP_MEMBER
    try:
        FieldShuffler(group)
    except ValueError as error:
        return str(error)
    return "made"


def test_a_rank_outside_the_group_is_told_so(pools):
    made, refused = pools(2).run(_balance_among_others)
    assert made == "made"
    assert refused.startswith("rank 1 is not in the process_group")


def _identity() -> bool:
    batch = draw_batch(np.random.default_rng(dist.get_rank()), 0, 4, 3)
    shuffler = BatchShufflerFactory.create("identity")
    plan = shuffler.plan(batch)
    return shuffler.exchange(batch, plan) is batch and plan.num_ranks == 1


def test_identity_moves_nothing(pools):
    assert all(pools(2).run(_identity))


def test_one_process_without_a_group_is_a_no_op():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 3)
    assert FieldShuffler().shuffle(batch) is batch


class BadShuffler(BatchShuffler):
    """Returns what it is told to, on rank 1; good workloads elsewhere."""

    def __init__(self, workloads) -> None:
        super().__init__()
        self._workloads = workloads

    def get_workloads(self, batch):
        if dist.get_rank() != 1:
            return batch.workload
        if isinstance(self._workloads, Exception):
            raise self._workloads
        return self._workloads


def _error_of_bad_workloads(workloads, step: int) -> str:
    shuffler = BadShuffler(workloads)
    if step:
        shuffler._workloads = torch.arange(3)
        shuffler.plan(draw_batch(np.random.default_rng(0), 0, 3, 3))
        shuffler._workloads = workloads
    try:
        shuffler.plan(draw_batch(np.random.default_rng(1), 0, 3, 3))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("workloads", "expected"),
    [
        (torch.arange(4), r"ValueError: BadShuffler.get_workloads returned shape \(4,\), .*: \(3,\)"),
        (torch.tensor([1, -5, 2]), "ValueError: BadShuffler.get_workloads returned -5 for row 1"),
        (torch.tensor([1, 2, float("nan")]), "ValueError: BadShuffler.get_workloads returned nan for row 2"),
        (torch.tensor([float("inf"), 2, 1]), "ValueError: BadShuffler.get_workloads returned inf for row 0"),
        (LookupError("no such table"), "LookupError: no such table"),
        (StopIteration("odd"), r"RuntimeError: BadShuffler.get_workloads raised StopIteration\('odd'\)"),
        (torch.tensor([0.25, 1.0, 2.0]), "ValueError: BadShuffler.get_workloads returned 0.25 for row 0"),
        (None, "ValueError: BadShuffler.get_workloads returned NoneType, expected integers"),
        (torch.zeros(3).cfloat(), "ValueError: BadShuffler.get_workloads returned torch.complex64"),
    ],
)
def test_bad_workloads_of_one_rank_are_the_same_error_on_all(pools, workloads, expected, step):
    errors = pools(2).run(_error_of_bad_workloads, workloads, step)
    assert errors[0] == errors[1]
    assert re.search(expected, errors[0])


def _notes_of_bad_workloads() -> str:
    shuffler = BadShuffler(LookupError("no such table"))
    with pytest.raises(LookupError) as error:
        shuffler.plan(draw_batch(np.random.default_rng(1), 0, 3, 3))
    return "".join(traceback.format_exception(error.value))


def test_every_rank_sees_where_the_error_was_raised(pools):
    elsewhere, here = pools(2).run(_notes_of_bad_workloads)
    assert "in get_workloads" in here
    assert "in get_workloads" in elsewhere and "raised on rank 1:" in elsewhere


def _error_of_other_fields(change: str, at_step: int) -> str:
    shuffler = FieldShuffler()
    for step in range(at_step + 1):
        batch = draw_batch(np.random.default_rng(step), 0, 3, 3)
        if step == at_step and dist.get_rank() == 1:
            if change == "dtype":
                batch.small = batch.small.float()
            elif change == "field":
                batch.flags = None
            else:
                features = batch.features
                batch.features = type(features)(
                    ["a", "b", "z"], features.values(), lengths=features.lengths()
                )
        try:
            shuffler.shuffle(batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("dtype", "field 'small' has dtype torch.float32, expected torch.float16"),
        ("field", "field 'flags' is missing"),
        ("keys", "field 'features' has keys ('a', 'b', 'z'), expected ('a', 'b', 'c')"),
    ],
)
def test_batches_that_differ_are_the_same_error_on_all_ranks(pools, change, expected, at_step):
    errors = pools(3).run(_error_of_other_fields, change, at_step)
    assert errors[0] == errors[1] == errors[2]
    assert errors[0].startswith("ValueError: rank 1 has a batch that differs")
    assert expected in errors[0]


def _first_batch_missing_on_rank_0() -> int:
    shuffler = FieldShuffler()
    empty = shuffler.plan(None)
    assert not empty.has_batch
    batch = None if dist.get_rank() == 0 else draw_batch(np.random.default_rng(5), 0, 4, 4)
    plan = shuffler.plan(batch)
    return shuffler.exchange(batch or shuffler.padding_batch(), plan).num_samples


def test_a_rank_without_any_batch_takes_part(pools):
    assert pools(2).run(_first_batch_missing_on_rank_0) == [2, 2]
