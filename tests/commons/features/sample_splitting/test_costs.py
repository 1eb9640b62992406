"""Pieces are cut by costs in columns, and by costs that were calibrated."""

from __future__ import annotations

import pytest

from tests.commons.distributed.column_costs import (
    COSTS,
    SLOW_ATTENTION,
    planned_by_calibrated_cost,
    planned_by_one_column_and_two,
)


def test_columns_that_add_up_to_one_are_cut_as_it_is(pools):
    for plans in pools(3).run(planned_by_one_column_and_two, {"equal_rows": False, "split": True}):
        assert sum(plan.rows.columns["pieces"] is not None for plan in plans) >= 6


@pytest.mark.parametrize("cost", COSTS)
def test_pieces_level_the_costs_that_were_calibrated(pools, cost):
    for plans in pools(3).run(planned_by_calibrated_cost, cost, {"split": True}):
        largest = [
            plan.loads.max() / plan.loads.mean() for plan in plans if plan.rows.columns["pieces"] is not None
        ]
        assert len(largest) >= (3 if cost is SLOW_ATTENTION else 0)
        assert max(largest, default=1) <= 1.02
