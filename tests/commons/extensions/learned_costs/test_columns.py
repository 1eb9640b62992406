"""The cost of each column of workloads is learned."""

import numpy as np
import pytest
import torch.distributed as dist

from commons.distributed import BatchShuffler, ShufflePlan
from commons.extensions.learned_costs import LearnedCosts
from commons.perf_model import Cost
from tests.commons.distributed.column_costs import Lengths, lengths_batch, once, squared
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.extensions.learned_costs.internals import LINEAR
from tests.commons.extensions.learned_costs.learning_pipelines import learned
from tests.on_ranks import on_ranks


def _learned(shuffler: BatchShuffler, first: int, last: int) -> ShufflePlan:
    """Plans and records steps in which attention is slow."""
    for step in range(first, last):
        plan = shuffler.plan(lengths_batch(step))
        seconds = plan.counts[:, 0] * 1e-4 + 1e-6 * np.bincount(
            plan.destination, plan.rows.tokens**2, minlength=plan.num_ranks
        )
        learned(shuffler).record(plan, float(seconds[dist.get_rank()]))
    return plan


@pytest.mark.parametrize("columns", [(once,), (squared,)])
@on_ranks(2)
def test_workloads_that_are_linear_in_tokens_are_named_once(columns):
    with warnings_of("commons.extensions.learned_costs.learning") as told:
        _learned(Lengths(*columns, extensions=[LearnedCosts()]), 0, 60)
    assert told == [LINEAR] * (columns == (once,) and dist.get_rank() == 0)


@on_ranks(2)
def test_what_does_not_fit_the_columns_is_learned_anew():
    before = Lengths(once, extensions=[LearnedCosts()])
    saved = learned(before).state(_learned(before, 0, 40))
    with warnings_of("commons.extensions.learned_costs.learning") as told:
        after = Lengths(once, squared, extensions=[LearnedCosts()])
        learned(after).load_state(saved)
        assert _learned(after, 40, 41).predicted_seconds is None
        assert _learned(after, 41, 90).predicted_seconds is not None
    assert len(learned(after).cost().coefficients) == 4
    warned = [line for line in told if line != LINEAR]
    assert len(warned) == (dist.get_rank() == 0)
    assert all(line.startswith("costs of 1 columns") and "learned anew" in line for line in warned)


@on_ranks(2)
def test_the_cost_of_each_column_is_learned_and_can_be_balanced_by(tmp_path):
    shuffler, path = Lengths(once, squared, extensions=[LearnedCosts()]), tmp_path / "cost.json"
    last, cost = _learned(shuffler, 0, 60), learned(shuffler).cost()
    per_sample, per_token, linear, quadratic = cost.coefficients
    assert quadratic == pytest.approx(1e3, rel=0.02) and per_sample == pytest.approx(1e5, rel=0.3)
    assert per_token + linear < 100
    if dist.get_rank() == 0:
        cost.save(path)
    dist.barrier()
    plan = Lengths(once, squared, cost=Cost.load(path)).plan(lengths_batch(59))
    assert np.array_equal(plan.rows.workloads, last.rows.workloads) and plan.predicted_seconds is not None
