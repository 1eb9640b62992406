"""Parts of a plan, on plans drawn at random, without processes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed import ShufflePlan
from commons.sequence_batch.row_schema import aligned


@st.composite
def plans(draw) -> tuple[ShufflePlan, list[np.ndarray]]:
    """Draws a plan whose samples stay within groups of ranks, and these groups; workloads are numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    num_ranks = draw(st.integers(1, 5))
    group_of = rng.integers(0, draw(st.integers(1, 3)), num_ranks)
    batch_sizes = rng.integers(0, 5, num_ranks)
    num_loaded = rng.integers(0, batch_sizes + 1)
    home = np.repeat(np.arange(num_ranks), num_loaded)
    count = len(home)
    mates = [np.flatnonzero(group_of == group_of[rank]) for rank in home]
    destination = np.array([rng.choice(ranks) for ranks in mates], dtype=np.int64)
    plan = ShufflePlan(
        batch_sizes=batch_sizes,
        num_loaded=num_loaded,
        workloads=np.arange(count),
        tokens=rng.integers(0, 9, count),
        loss_tokens=rng.integers(0, 9, count),
        num_elements=rng.integers(0, 9, (count, 2)),
        sample_bytes=rng.integers(1, 99, count),
        row_counts=rng.integers(0, 9, (count, 3)),
        destination=destination,
        micro_batch=rng.integers(0, 2, count),
        rows=np.maximum(np.bincount(destination, minlength=num_ranks), 1),
        num_micro_batches=2,
    )
    return plan, [np.flatnonzero(group_of == group) for group in np.unique(group_of)]


@given(drawn=plans())
def test_groups_together_have_each_sample_once(drawn):
    plan, groups = drawn
    parts = [plan.within(ranks) for ranks in groups]
    numbers = np.concatenate([part.workloads for part in parts])
    assert sorted(numbers.tolist()) == list(range(len(plan.rows.workloads)))
    for ranks, part in zip(groups, parts, strict=True):
        assert np.array_equal(ranks[part.home], plan.rows.home[part.workloads])
        assert np.array_equal(ranks[part.destination], plan.destination[part.workloads])
        assert np.array_equal(part.rows, plan.num_rows[ranks])
        assert np.array_equal(part.loads, plan.loads[ranks])
        assert [part.loss_tokens_on(rank) for rank in range(len(ranks))] == [
            plan.loss_tokens_on(rank) for rank in ranks
        ]
        assert part.num_micro_batches == plan.step["num_micro_batches"]
    assert sum(part.num_loss_tokens for part in parts) == plan.num_loss_tokens


@given(drawn=plans())
def test_samples_know_where_they_were_loaded(drawn):
    plan, _ = drawn
    places = [plan.rows.where_loaded(sample) for sample in range(len(plan.rows.workloads))]
    assert places == [(rank, row) for rank, real in enumerate(plan.rows.num_loaded) for row in range(real)]
    assert [rank for rank, _ in places] == plan.rows.home.tolist()
    assert plan.moves == any(rank != to for (rank, _), to in zip(places, plan.destination, strict=True))


@given(drawn=plans())
def test_both_ends_of_a_route_agree(drawn):
    plan, _ = drawn
    routes = [plan.route(rank) for rank in range(plan.num_ranks)]
    for here, route in enumerate(routes):
        assert np.array_equal(route.held.ranks, plan.destination[plan.rows.home == here])
        for there, other in enumerate(routes):
            sent, received = route.held.ranks == there, other.wanted.ranks == here
            assert np.array_equal(route.held.elements[sent], other.wanted.elements[received])
            num_bytes = route.held.chunk_bytes[there]
            assert num_bytes == other.wanted.chunk_bytes[here]
            moving = (plan.rows.home == here) & (plan.destination == there)
            assert num_bytes == (0 if here == there else aligned(plan.rows.sample_bytes[moving].sum()))


@given(drawn=plans())
def test_only_plans_with_equal_arrays_are_equal_and_have_equal_fingerprints(drawn):
    plan, _ = drawn
    copied = replace(plan)
    assert copied == plan and copied.fingerprint == plan.fingerprint
    for field in fields(plan):
        value = getattr(plan, field.name)
        if value is not None and np.size(value):
            changed = np.array(value)
            changed.flat[-1] += 1
            other = replace(plan, **{field.name: changed})
            assert other != plan and other.fingerprint != plan.fingerprint, field.name
