"""All ranks launch the collectives of training and evaluation in one order, group by group and over all."""

from __future__ import annotations

import pytest

from tests.commons.pipeline.launches import check_launches, launches


@pytest.mark.parametrize("settings", [{}, {"equal_rows": False}])
@pytest.mark.parametrize("name", ["none", "native"])
def test_all_ranks_launch_the_same_collectives_in_the_same_order(pools, name, settings):
    check_launches(pools(3).run(launches, name, settings), 2)  # the job's, and the exchange's
