"""Costs of samples and pieces: columns of workloads, and costs that were fitted to times."""

from __future__ import annotations

import io
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport, BatchShuffler, ShufflePlan
from commons.perf_model import Cost, HSTUFlops
from commons.perf_model.cost import LINEAR
from hstu.batch_shuffler import HSTUBatchShuffler
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.features.sample_splitting.cut_samples import batch_of, drawn_lengths

FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=2, head_dim=64)
SLOW_ATTENTION = Cost((1e5, 20.0, 1e-4, 1e-2))
ROWS = 6


class SumOfColumns(HSTUBatchShuffler):
    """The FLOPs of HSTU layers in one column."""

    def get_workloads(self, batch):
        return super().get_workloads(batch).sum(1)

    def prefix_cost(self, tokens, counts):
        return super().prefix_cost(tokens, counts).sum(1)


def _plans(shuffler: BatchShuffler, steps: int) -> list[ShufflePlan]:
    rng = np.random.default_rng(dist.get_rank())
    return [shuffler.plan(batch_of("hstu", drawn_lengths(rng, ROWS))) for _ in range(steps)]


def _by_one_column_and_two(settings: dict[str, Any]) -> int:
    one, two = (
        _plans(kind(FLOPS, verify=True, **settings), 12) for kind in (SumOfColumns, HSTUBatchShuffler)
    )
    for of_sum, of_columns in zip(one, two, strict=True):
        for spec in fields(ShufflePlan):
            mine, others = (getattr(plan, spec.name) for plan in (of_sum, of_columns))
            if spec.name == "work":
                np.testing.assert_array_equal(mine[:, 0], others.sum(1))
            else:
                np.testing.assert_array_equal(mine, others)
    return sum(plan.pieces is not None for plan in two)


@pytest.mark.parametrize("settings", [{}, {"equal_rows": False, "split": True}])
def test_columns_that_add_up_to_one_are_placed_and_cut_as_it_is(pools, settings):
    cut = pools(3).run(_by_one_column_and_two, settings)
    assert min(cut) >= (6 if settings else 0)


def _by_calibrated_cost(cost: Cost) -> list[float]:
    shuffler = HSTUBatchShuffler(FLOPS, cost=cost, verify=True, equal_rows=False, split=True)
    largest = []
    for plan in _plans(shuffler, 12):
        whole = np.flatnonzero(plan.starts_sample)
        of_samples = {name: np.add.reduceat(getattr(plan, name), whole) for name in ("work", "tokens")}
        expected = cost.of(1, of_samples["tokens"], of_samples["work"])
        np.testing.assert_array_equal(np.add.reduceat(plan.workloads, whole), expected)
        counted = cost.of(plan.starts_sample, plan.tokens, plan.work)
        np.testing.assert_allclose(plan.workloads, counted, atol=1)  # differences of rounded costs
        np.testing.assert_allclose(cost.step_seconds(plan.counts), plan.predicted_seconds, rtol=1e-6)
        assert BalanceReport.of(plan, False, unit=shuffler.unit).unit == "predicted ns"
        if plan.pieces is not None:
            largest.append(plan.loads.max() / plan.loads.mean())
    return largest


@pytest.mark.parametrize("cost", [SLOW_ATTENTION, Cost((0, 0, 1.0, 0), per_step=1e7), Cost((1e6, 1, 0, 0))])
def test_pieces_level_the_costs_that_were_fitted(pools, cost):
    for largest in pools(3).run(_by_calibrated_cost, cost):
        assert len(largest) >= (3 if cost is SLOW_ATTENTION else 0)
        assert max(largest, default=1) <= 1.02


class Lengths(BatchShuffler):
    """The workloads of a length are these columns."""

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


def _batch(step: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng((step, dist.get_rank()))
    return {"length": torch.from_numpy(rng.integers(8, 1000, ROWS))}


def _errors() -> list[str]:
    other = dist.get_rank() == 1
    columns = Lengths(once, squared)
    columns.plan(_batch(0))
    if other:
        columns.columns = (once,)
    cost = Cost((1.0, 1.0, 1.0))
    return [
        error_of(Lengths(*[once, squared][: 1 + other]).plan, _batch(0)),
        error_of(columns.plan, _batch(1)),
        error_of(Lengths(once, squared, cost=cost).plan, _batch(0)),
        error_of(Lengths(once, cost=cost if other else Cost((2.0, 1.0, 1.0))).plan, _batch(0)),
        error_of(Lengths(once, fractions).plan, _batch(0)),
        error_of(Lengths(once, lambda length: -length).plan, _batch(0)),
    ]


def test_errors_of_columns_are_the_same_on_all_ranks(pools):
    first, second = pools(2).run(_errors)
    for errors in (first, second):
        for error, part in zip(
            errors,
            [
                "rank 1 has a batch with 2 columns of get_workloads, row_counts of (), and no groups; rank 0",
                "no groups; the first one had 2 columns of get_workloads",
                "is of 1 columns of get_workloads, which returns 2; calibrate this model",
                "shuffler has cost=Cost(coefficients=(1.0, 1.0, 1.0)",
                "Lengths.get_workloads returned ",
                "Lengths.get_workloads returned -",
            ],
            strict=True,
        ):
            assert "ValueError" in error and part in error, error


def _learned(shuffler: BatchShuffler, first: int, last: int) -> ShufflePlan:
    """Plans and records steps in which attention is slow."""
    for step in range(first, last):
        plan = shuffler.plan(_batch(step))
        seconds = plan.counts[:, 0] * 1e-4 + 1e-6 * np.bincount(
            plan.destination, plan.tokens**2, minlength=plan.num_ranks
        )
        shuffler.record(plan, float(seconds[dist.get_rank()]))
    return plan


def _warnings(columns: tuple[Any, ...]) -> list[str]:
    with warnings_of("commons.distributed.learning") as told:
        _learned(Lengths(*columns, cost="learned"), 0, 60)
    return told


def test_workloads_that_are_linear_in_tokens_are_named_once(pools):
    pool = pools(2)
    assert pool.run(_warnings, (once,)) == [[LINEAR], []]
    assert pool.run(_warnings, (once, squared)) == pool.run(_warnings, (squared,)) == [[], []]


def _resumed_with(columns: tuple[Any, ...], is_old: bool) -> tuple[list[str], bool, bool, bool]:
    """Returns warnings, whether costs are known at once and at last, and whether the ranks plan alike."""
    before = Lengths(once, cost="learned")
    saved = before.learning_state(_learned(before, 0, 40))
    if is_old:
        arrays = dict(np.load(io.BytesIO(saved["learned"])))
        arrays["coefficients"] = arrays.pop("nanoseconds")
        file = io.BytesIO()
        np.savez(file, **arrays)
        saved["learned"] = file.getvalue()
    with warnings_of("commons.distributed.learning") as told:
        after = Lengths(*columns, cost="learned", verify=True)
        after.load_learning_state(saved)
        first = _learned(after, 40, 41)
        last = _learned(after, 41, 90)
    known = [plan.predicted_seconds is not None for plan in (first, last)]
    return [line for line in told if line != LINEAR], *known, len(after.learned_cost().coefficients)


def test_what_does_not_fit_the_columns_is_learned_anew(pools):
    pool = pools(2)
    assert pool.run(_resumed_with, (once,), False) == [([], True, True, 3)] * 2
    changed = pool.run(_resumed_with, (once, squared), False)
    old = pool.run(_resumed_with, (once,), True)
    for (told, *others), columns, reason in (
        (changed[0], 2, "costs of 1 columns"),
        (old[0], 1, "older versions"),
    ):
        assert len(told) == 1 and reason in told[0] and told[0].endswith("costs and speeds are learned anew")
        assert others == [False, True, 2 + columns]
    assert changed[1][0] == old[1][0] == []


def _learned_cost() -> np.ndarray:
    shuffler = Lengths(once, squared, cost="learned")
    _learned(shuffler, 0, 60)
    return np.array(shuffler.learned_cost().coefficients)


def test_the_cost_of_each_column_is_learned(pools):
    for coefficients in pools(2).run(_learned_cost):
        per_sample, per_token, linear, quadratic = coefficients
        assert quadratic == pytest.approx(1e3, rel=0.02) and per_sample == pytest.approx(1e5, rel=0.3)
        assert per_token + linear < 100


def _in_a_file(path: str) -> bool:
    shuffler = Lengths(once, squared, cost="learned")
    last = _learned(shuffler, 0, 60)
    if dist.get_rank() == 0:
        shuffler.learned_cost().save(path)
    dist.barrier()
    calibrated = Lengths(once, squared, cost=Cost.load(path))
    plan = calibrated.plan(_batch(59))
    return np.array_equal(plan.workloads, last.workloads) and plan.predicted_seconds is not None


def test_a_learned_cost_can_be_saved_and_balanced_by(pools, tmp_path):
    assert pools(2).run(partial(_in_a_file, str(tmp_path / "cost.json"))) == [True, True]
