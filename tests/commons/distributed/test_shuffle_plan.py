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
    num_ranks, num_steps = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    group_of = rng.integers(0, draw(st.integers(1, 3)), num_ranks)
    batch_sizes = rng.integers(0, 5, (num_ranks, num_steps))
    num_loaded = rng.integers(0, batch_sizes + 1)
    home = np.repeat(np.arange(num_ranks), num_loaded.sum(1))
    count = len(home)
    step = np.repeat(np.tile(np.arange(num_steps), num_ranks), num_loaded.ravel())
    moves = np.isin(home, rng.permutation(num_ranks)[: draw(st.integers(0, num_ranks))])
    step = np.where(moves, rng.integers(0, num_steps, count), step)
    mates = [np.flatnonzero(group_of == group_of[rank]) for rank in home]
    destination = np.array([rng.choice(ranks) for ranks in mates], dtype=np.int64)
    rows = np.zeros((num_ranks, num_steps), dtype=np.int64)
    np.add.at(rows, (destination, step), 1)
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
        step=step,
        micro_batch=rng.integers(0, 2, count),
        rows=np.maximum(rows, 1),
        micro_batch_counts=np.full(num_steps, 2),
    )
    return plan, [np.flatnonzero(group_of == group) for group in np.unique(group_of)]


@given(drawn=plans())
def test_steps_partition_the_samples(drawn):
    plan, _ = drawn
    numbers = [step.workloads for step in plan.steps]
    assert sorted(np.concatenate(numbers).tolist()) == list(range(len(plan.workloads)))
    for number, (step, samples) in enumerate(zip(plan.steps, numbers, strict=True)):
        assert (step.num_steps, step.num_ranks) == (1, plan.num_ranks)
        assert (plan.step[samples] == number).all()
        for name in ("home", "destination", "tokens", "loss_tokens", "sample_bytes", "micro_batch"):
            assert np.array_equal(getattr(step, name), getattr(plan, name)[samples]), name
        assert np.array_equal(step.num_elements, plan.num_elements[samples])
        assert np.array_equal(step.rows[:, 0], plan.rows[:, number])
        assert step.micro_batch_counts == plan.micro_batch_counts[number]
        assert (step.num_loaded <= step.batch_sizes).all()
        for rank in range(plan.num_ranks):
            assert step.loss_tokens_on(rank) == step.loss_tokens[step.destination == rank].sum()
    assert sum(step.num_loss_tokens for step in plan.steps) == plan.num_loss_tokens


@given(drawn=plans())
def test_groups_together_have_each_sample_once(drawn):
    plan, groups = drawn
    parts = [plan.within(ranks) for ranks in groups]
    numbers = np.concatenate([part.workloads for part in parts])
    assert sorted(numbers.tolist()) == list(range(len(plan.workloads)))
    for ranks, part in zip(groups, parts, strict=True):
        assert np.array_equal(ranks[part.home], plan.home[part.workloads])
        assert np.array_equal(ranks[part.destination], plan.destination[part.workloads])
        assert np.array_equal(part.rows, plan.rows[ranks])
        assert np.array_equal(part.micro_batch_counts, plan.micro_batch_counts)
        # A step of a group is the group's part of the step.
        assert part.steps == tuple(step.within(ranks) for step in plan.steps)


@given(drawn=plans())
def test_rows_of_batches_lead_back_from_rows_for_steps(drawn):
    plan, _ = drawn
    for rank in range(plan.num_ranks):
        brought = [plan.positions_for_step(rank, step) for step in range(plan.num_steps)]
        starts = np.cumsum(plan.batch_sizes[rank]) - plan.batch_sizes[rank]
        for step, rows in enumerate(brought):
            assert len(rows) == plan.steps[step].num_loaded[rank, 0]
        for batch, (start, real) in enumerate(zip(starts, plan.num_loaded[rank], strict=True)):
            back = np.concatenate(brought)[plan.rows_of_batch(rank, batch)]
            assert np.array_equal(back, start + np.arange(real))
            if plan.keeps_batches[rank]:
                assert np.array_equal(back, brought[batch])
        if plan.keeps_batches[rank]:
            brought_sizes = [step.batch_sizes[rank, 0] for step in plan.steps]
            assert brought_sizes == plan.batch_sizes[rank].tolist()
        mine = plan.loaded_by(rank)
        assert plan.keeps_batches[rank] == (plan.step[mine] == plan.batch_of[mine]).all()


@given(drawn=plans())
def test_samples_know_where_they_were_loaded(drawn):
    plan, _ = drawn
    places = [plan.where_loaded(sample) for sample in range(len(plan.workloads))]
    assert places == [
        (rank, batch, row)
        for rank, of_rank in enumerate(plan.num_loaded)
        for batch, real in enumerate(of_rank)
        for row in range(real)
    ]
    assert [rank for rank, _, _ in places] == plan.home.tolist()
    assert [batch for _, batch, _ in places] == plan.batch_of.tolist()
    assert plan.moves == any(rank != to for (rank, _, _), to in zip(places, plan.destination, strict=True))


@given(drawn=plans())
def test_both_ends_of_a_route_agree(drawn):
    plan = drawn[0].steps[0]
    routes = [plan.route(rank) for rank in range(plan.num_ranks)]
    for here, route in enumerate(routes):
        assert np.array_equal(route.held.ranks, plan.destination[plan.home == here])
        for there, other in enumerate(routes):
            sent, received = route.held.ranks == there, other.wanted.ranks == here
            assert np.array_equal(route.held.elements[sent], other.wanted.elements[received])
            num_bytes = route.held.chunk_bytes[there]
            assert num_bytes == other.wanted.chunk_bytes[here]
            moving = (plan.home == here) & (plan.destination == there)
            assert num_bytes == (0 if here == there else aligned(plan.sample_bytes[moving].sum()))


@given(drawn=plans())
def test_only_plans_with_equal_arrays_are_equal_and_have_equal_fingerprints(drawn):
    plan, _ = drawn
    copied = replace(plan)
    assert copied == plan and copied.fingerprint == plan.fingerprint
    for field in fields(plan):
        value = getattr(plan, field.name)
        if value is not None and value.size:
            changed = value.copy()
            changed.flat[-1] += 1
            other = replace(plan, **{field.name: changed})
            assert other != plan and other.fingerprint != plan.fingerprint, field.name
