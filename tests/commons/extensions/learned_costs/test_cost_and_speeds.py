"""Costs and speeds fitted to steps."""

import numpy as np
import pytest

from commons.perf_model import Cost
from tests.commons.extensions.learned_costs.internals import (
    LEAST_TIMES,
    MOST_CHANGE,
    fitted,
    followed_speed,
    follows_workloads,
    median_error,
    refitted,
    speeds_then,
)
from tests.commons.perf_model.internals import sum_counts

RANKS, ROWS, STEPS = 4, 8, 48
# Seconds per sample, token, and unit of a linear and a quadratic column.
TRUE = {
    "by workload": [0, 0, 1e-9, 1e-9],
    "per sample": [0.004, 0, 1e-9, 1e-9],
    "slow attention": [0, 0, 1e-9, 8e-9],
    "slow products": [0, 0, 8e-9, 1e-9],
}


def drawn(rng: np.random.Generator, coefficients, noise=0.02, steps=STEPS, lengths=None, speeds=None):
    """(counts, seconds) of some steps, with as many rows on each rank as a draw says."""
    counts = np.zeros((steps, RANKS, 4))
    for step in range(steps):
        rank_of = rng.integers(0, RANKS, RANKS * ROWS)
        tokens = rng.lognormal(5, 1.2, RANKS * ROWS).clip(1, 2048).astype(np.int64)
        if lengths is not None:
            tokens[:] = lengths
            rank_of = np.repeat(np.arange(RANKS), ROWS)
        work = np.stack([1000 * tokens, 4 * tokens**2], 1)
        counts[step] = sum_counts(np.ones(RANKS * ROWS), tokens, work, rank_of, RANKS)
    speeds = np.ones(RANKS) if speeds is None else speeds
    seconds = counts @ np.array(coefficients, dtype=float) / speeds
    return counts, seconds * rng.lognormal(0, noise, seconds.shape)


@pytest.mark.parametrize("name", TRUE)
def test_predicts_steps_it_was_not_fitted_to_and_some_that_stand_out_hardly_matter(name):
    rng = np.random.default_rng(0)
    cost = None
    for _ in range(3):
        work, seconds = drawn(rng, TRUE[name], speeds=np.array([1, 0.5, 1, 1.3]))
        cost = refitted(cost, work, seconds)
    slowed = seconds.copy()
    slowed[rng.integers(0, STEPS, 6)] *= 4  # a checkpoint, or a collection of garbage
    with_slowed = refitted(None, work, slowed)
    work, seconds = drawn(rng, TRUE[name])
    assert median_error(cost.step_seconds(work), seconds) < 1.5 * 0.02
    assert median_error(with_slowed.step_seconds(work), seconds) < 2 * 0.02
    assert follows_workloads(cost) == (name == "by workload")


@pytest.mark.parametrize("speed", [0.4, 1.5])
def test_a_change_of_speed_does_not_pass_for_cost(speed):
    rng = np.random.default_rng(8)
    before, after = (
        drawn(rng, TRUE["per sample"], steps=STEPS // 2, speeds=np.array([1, of_rank, 1, 1]))
        for of_rank in (1, speed)
    )
    work, seconds = (np.concatenate(parts) for parts in zip(before, after, strict=True))
    speeds = speeds_then(None, work, seconds)
    np.testing.assert_allclose(speeds[: STEPS // 2 - 2], 1, atol=0.1)
    np.testing.assert_allclose(speeds[STEPS // 2 + 2 :, 1], speed, rtol=0.1)
    cost = refitted(None, work, seconds)
    new_work, new_seconds = drawn(rng, TRUE["per sample"])
    assert median_error(cost.step_seconds(new_work), new_seconds) < 2 * 0.02


def test_coefficients_without_evidence_are_kept():
    rng = np.random.default_rng(2)
    work, seconds = drawn(rng, TRUE["per sample"])
    known = kept = refitted(None, work, seconds)
    assert not follows_workloads(known)
    for _ in range(10):  # all rows and lengths equal: only the sum of all parts can be seen
        kept = refitted(kept, *drawn(rng, TRUE["per sample"], lengths=200))
    shares = [
        np.array(cost.coefficients) * work.mean((0, 1)) * 1e-9 / cost.step_seconds(work).mean()
        for cost in (kept, known)
    ]
    np.testing.assert_allclose(*shares, atol=0.05)


def test_leaves_for_workloads_when_these_predict_better():
    rng = np.random.default_rng(3)
    work = rng.lognormal(0, 0.5, (64, RANKS, 4))  # nothing follows from anything else
    seconds = work[:, :, 0].copy()
    cost = refitted(None, work, seconds)
    assert not follows_workloads(cost)
    load = work[..., 2:].sum(-1)
    per_load = fitted(load[:48].reshape(-1, 1), seconds[:48].ravel(), 5)
    seconds[48:] = load[48:] * per_load  # from here on, workloads tell the times
    assert follows_workloads(refitted(cost, work, seconds))


def test_too_few_steps_change_nothing():
    work, seconds = drawn(np.random.default_rng(4), TRUE["slow attention"], steps=LEAST_TIMES // RANKS - 1)
    assert refitted(None, work, seconds) is None


def test_costs_of_samples_add_up_to_those_of_ranks():
    rng = np.random.default_rng(5)
    tokens, rank_of = rng.integers(0, 5000, 64), rng.integers(0, RANKS, 64)
    starts, work = rng.integers(0, 2, 64), np.stack([7 * tokens, tokens**2], 1)
    cost = Cost((1e7, 1e4, 1.0, 1e-3))
    of_ranks = np.bincount(rank_of, cost.of(starts, tokens, work), minlength=RANKS)
    counts = sum_counts(starts, tokens, work, rank_of, RANKS)
    np.testing.assert_allclose(cost.step_seconds(counts), of_ranks * 1e-9)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 1.3, 0.2, 5.0])
def test_a_speed_comes_to_what_was_measured_and_stays_there(ratio):
    rng = np.random.default_rng(6)
    speed, trace = 1.0, []
    for _ in range(60):
        last, speed = speed, followed_speed(speed, ratio * rng.lognormal(0, 0.02, 12))
        assert abs(speed / last - 1) <= MOST_CHANGE + 1e-9
        trace.append(speed)
    assert speed == pytest.approx(ratio, rel=0.05)
    assert np.ptp(trace[-20:]) <= 0.05 * ratio  # no oscillation


def test_noise_changes_no_speed():
    rng = np.random.default_rng(7)
    for noise in (0.01, 0.05, 0.2):
        speeds = [followed_speed(1.0, rng.lognormal(0, noise, 12)) for _ in range(300)]
        assert np.mean(np.array(speeds) != 1.0) < 0.1
