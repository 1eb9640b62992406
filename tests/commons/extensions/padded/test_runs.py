"""Runs of sorted samples."""

import numpy as np
import pytest

from commons.extensions.padded.runs import NO_LIMIT, Limits, cut_into_runs, padded_costs, ranks_of_runs


def largest_cost(work: np.ndarray, num_runs: int, limits: Limits) -> int | None:
    """Returns the largest cost of a run, after checks; None if there are no such runs."""
    starts, tokens = np.array([0, len(work)]), work[:, 0].copy()
    fits, ends = cut_into_runs(work, tokens, starts, num_runs, limits)
    if not fits:
        return None
    sizes = np.diff(ends[0], prepend=0)
    assert ends[0, -1] == len(work) and (sizes >= (len(work) >= num_runs)).all()
    run_of = np.repeat(np.arange(num_runs), sizes)
    return int(padded_costs(work, run_of, sizes).max())


def smaller_exists(work: list[int], num_parts: int, cost: int) -> bool:
    """Returns whether any placement of samples, heaviest first, has only parts below this cost."""

    def place(number: int, parts: list[tuple[int, int]]) -> bool:
        if number == len(work):
            return True
        for index, (size, longest) in enumerate(parts):
            if (size + 1) * max(longest, work[number]) < cost and (size, longest) not in parts[:index]:
                grown = [*parts[:index], (size + 1, max(longest, work[number])), *parts[index + 1 :]]
                if place(number + 1, grown):
                    return True
        return False

    return place(0, [(0, 0)] * num_parts)


def test_no_placement_is_better():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        work = np.sort(rng.lognormal(2, rng.choice([0.2, 1, 2]), rng.integers(1, 11)).astype(np.int64))[::-1]
        num_parts = int(rng.integers(1, 5))
        cost = largest_cost(work[:, None].copy(), num_parts, Limits())
        assert cost is not None and not smaller_exists(work.tolist(), num_parts, cost), (work, num_parts)


def test_large_work_does_not_overflow():
    small = np.sort(np.random.default_rng(1).integers(1, 1000, 32_768))[::-1][:, None].copy()
    for num_runs in (2, 1024):
        starts, tokens = np.array([0, len(small)]), small[:, 0].copy()
        fits, expected = cut_into_runs(small, tokens, starts, num_runs, Limits())
        large = cut_into_runs(small * 10**12, tokens, starts, num_runs, Limits())
        # Two runs of 10¹⁵ × 16,384 are above every limit.
        assert fits and large[0] == (num_runs > 2) and (num_runs == 2 or (large[1] == expected).all())


@pytest.mark.parametrize("num_columns", [1, 3])
def test_runs_keep_limits_or_there_are_none(num_columns):
    rng = np.random.default_rng(2)
    for _ in range(300):
        work = rng.integers(0, 30, (rng.integers(1, 40), num_columns))
        work, num_runs = work[np.argsort(-work.sum(1), kind="stable")], int(rng.integers(1, 6))
        free = largest_cost(work, num_runs, Limits())
        assert largest_cost(work, num_runs, Limits(cost=free)) == free  # the least
        if free:
            assert largest_cost(work, num_runs, Limits(cost=free - 1)) is None
        tokens, starts = work[:, 0].copy(), np.array([0, len(work)])
        limits = Limits(NO_LIMIT, *rng.integers(20, 400, 2).tolist(), int(rng.integers(2, 20)))
        fits, ends = cut_into_runs(work, tokens, starts, num_runs, limits)
        if fits:
            for start, end in zip(np.append(0, ends[0]), ends[0], strict=False):
                own = tokens[start:end]
                within = (
                    len(own) * own.max(initial=0) <= limits.padded_tokens,
                    own.sum() <= limits.real_tokens,
                )
                assert len(own) <= 1 or (all(within) and len(own) <= limits.samples)


def test_a_run_goes_to_the_rank_then_the_node_that_holds_most():
    run_of, home = np.array([0, 0, 1, 1, 2, 3]), np.array([2, 3, 3, 1, 3, 3])
    sizes = np.array([1, 5, 9, 2, 4, 4])
    # Run 0 takes rank 3; run 1 then takes rank 1; run 2 finds rank 3's node, {2, 3}; run 3 takes the last.
    assert ranks_of_runs(run_of, home, sizes, 4, 2).tolist() == [3, 1, 2, 0]
    assert ranks_of_runs(run_of[:2], home[:2], sizes[:2], 4, 2).tolist() == [3, 0, 1, 2]
