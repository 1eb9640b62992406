"""Pieces of samples keep groups together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from commons.distributed import ShufflePlan, ShufflerSettings
from commons.distributed.row_table import RowTable
from commons.distributed.placement import place
from tests.commons.features.sample_splitting.cut_samples import batch_of, loaded_by
from tests.commons.histories import drawn_lengths


def _imbalance(plan: ShufflePlan) -> float:
    return plan.loads.max() / max(plan.loads.mean(), 1)


def _groups_per_rank(samples: RowTable, plan: ShufflePlan) -> int:
    return len(set(zip(samples.groups[plan.rows.sample_of].tolist(), plan.destination.tolist(), strict=True)))


def test_pieces_under_max_tokens_keep_groups_together():
    """With groups nothing is refused that has a place without, and ranks share fewer groups."""
    apart = together = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        rows, num_ranks = rng.integers(2, 9, 2).tolist()
        lengths = drawn_lengths(np.random.default_rng(seed), rows * num_ranks)
        samples, cutting = loaded_by([rows] * num_ranks, batch_of("history", lengths))
        settings = partial(ShufflerSettings, equal_rows=False, split=True)
        num_samples = len(samples.workloads)
        with_groups = replace(samples, groups=rng.integers(0, max(num_samples // 3, 1), num_samples))
        cap = int(samples.tokens.sum() / samples.num_ranks * rng.choice([1.02, 1.1, 1.3]))
        try:
            alone = place(samples, settings(max_tokens=cap), cutting=cutting)
        except ValueError:
            continue
        plan = place(with_groups, settings(max_tokens=cap), cutting=cutting)
        assert np.array_equal(plan.rows.columns["groups"], with_groups.groups[plan.rows.sample_of])
        assert np.bincount(plan.destination, plan.rows.tokens).max() <= cap
        assert _imbalance(plan) <= max(_imbalance(alone), 1.011)
        apart += _groups_per_rank(with_groups, alone)
        together += _groups_per_rank(with_groups, plan)
    assert 0 < together < 0.9 * apart
