"""Shufflers whose workloads have columns, and checks of what plans make of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport, BatchShuffler, Extension, ShufflePlan
from commons.perf_model import Cost
from tests.commons.histories import FlopsShuffler, drawn_lengths, histories

ROWS = 6
SLOW_ATTENTION = Cost((1e5, 20.0, 1e-4, 1e-2))
COSTS = [SLOW_ATTENTION, Cost((0, 0, 1.0, 0), per_step=1e7), Cost((1e6, 1, 0, 0))]


class SumOfColumns(FlopsShuffler):
    def get_workloads(self, batch):
        return super().get_workloads(batch).sum(1)

    def prefix_cost(self, tokens, counts):
        return super().prefix_cost(tokens, counts).sum(1)


def _plans(shuffler: BatchShuffler, steps: int = 12) -> list[ShufflePlan]:
    rng = np.random.default_rng(dist.get_rank())
    return [
        shuffler.plan(histories(drawn_lengths(rng, ROWS), num_users=np.arange(ROWS) % 3))
        for _ in range(steps)
    ]


def planned_by_one_column_and_two(
    settings: dict[str, Any], extensions: Sequence[type[Extension]] = ()
) -> list[ShufflePlan]:
    """Checks that plans are the same; returns them."""
    one, two = (
        _plans(kind(extensions=[extension() for extension in extensions], **settings))
        for kind in (SumOfColumns, FlopsShuffler)
    )
    for of_sum, of_columns in zip(one, two, strict=True):
        np.testing.assert_array_equal(of_sum.rows.work[:, 0], of_columns.rows.work.sum(1))
        assert replace(of_sum, rows=replace(of_sum.rows, work=of_columns.rows.work)) == of_columns
    return two


def planned_by_calibrated_cost(cost: Cost, extensions: Sequence[type[Extension]] = ()) -> list[ShufflePlan]:
    """Checks that the cost of a sample is that of all its rows; returns the plans."""
    shuffler = FlopsShuffler(
        cost=cost, equal_rows=False, extensions=[extension() for extension in extensions]
    )
    plans = _plans(shuffler)
    for plan in plans:
        rows, whole = plan.rows, np.flatnonzero(plan.rows.starts_sample)
        tokens, work = (np.add.reduceat(of_rows, whole) for of_rows in (rows.tokens, rows.work))
        of_samples = np.add.reduceat(rows.workloads, whole)
        np.testing.assert_array_equal(of_samples, cost.of(1, tokens, work))
        counted = cost.of(rows.starts_sample, rows.tokens, rows.work)
        np.testing.assert_allclose(rows.workloads, counted, atol=1)  # differences of rounded costs
        np.testing.assert_allclose(cost.step_seconds(plan.counts), plan.predicted_seconds, rtol=1e-6)
        assert BalanceReport.of(plan, False, unit=shuffler.unit).unit == "predicted ns"
    return plans


class Lengths(BatchShuffler):
    def __init__(self, *columns, **settings):
        super().__init__(equal_rows=False, **settings)
        self.columns = columns

    def get_workloads(self, batch):
        if len(self.columns) == 1:
            return self.columns[0](batch["length"])
        return torch.stack([of(batch["length"]) for of in self.columns], 1)

    def get_tokens(self, batch):
        return batch["length"]


def once(length):
    return length


def squared(length):
    return length**2


def fractions(length):
    return length / 7


def lengths_batch(step: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng((step, dist.get_rank()))
    return {"length": torch.from_numpy(rng.integers(8, 1000, ROWS))}
