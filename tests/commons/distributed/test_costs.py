"""Costs of samples: columns of workloads, and costs that were calibrated."""

import pytest
import torch.distributed as dist

from commons.perf_model import Cost
from tests.commons.distributed.column_costs import (
    COSTS,
    Lengths,
    fractions,
    lengths_batch,
    once,
    planned_by_calibrated_cost,
    planned_by_one_column_and_two,
    squared,
)
from tests.commons.distributed.errors_and_warnings import error_of
from tests.on_ranks import on_ranks


def test_columns_that_add_up_to_one_are_placed_as_it_is(pools):
    plans = pools(3).run(planned_by_one_column_and_two, {})
    assert plans == [plans[0]] * 3


@pytest.mark.parametrize("cost", COSTS)
def test_loads_are_of_the_costs_that_were_calibrated(pools, cost):
    plans = pools(3).run(planned_by_calibrated_cost, cost)
    assert plans == [plans[0]] * 3


@on_ranks(2)
def test_errors_of_columns_are_the_same_on_all_ranks():
    other = dist.get_rank() == 1
    columns = Lengths(once, squared)
    columns.plan(lengths_batch(0))
    if other:
        columns.columns = (once,)
    cost = Cost((1.0, 1.0, 1.0))
    errors = {
        "rank 1 has a batch with 2 columns of get_workloads, but rank 0": error_of(
            Lengths(*[once, squared][: 1 + other]).plan, lengths_batch(0)
        ),
        "of get_workloads, but the first batch has 2 columns": error_of(columns.plan, lengths_batch(1)),
        "is for 1 columns of get_workloads, which returns 2; calibrate this model": error_of(
            Lengths(once, squared, cost=cost).plan, lengths_batch(0)
        ),
        "shuffler has cost=Cost(coefficients=(1.0, 1.0, 1.0)": error_of(
            Lengths, once, cost=cost if other else Cost((2.0, 1.0, 1.0))
        ),
        "(str): expected Cost or None": error_of(Lengths, once, cost="measured"),
        "Lengths.get_workloads returned ": error_of(Lengths(once, fractions).plan, lengths_batch(0)),
    }
    for message, error in errors.items():
        assert message in error, error
