"""Reports of steps, the time that a rank computes, and the order in which ranks launch collectives."""

from __future__ import annotations

import pytest

from tests.commons.pipeline.launches import check_launches, launches
from tests.commons.pipeline.runs import check_printed, check_spans, printed_report, spans


def test_a_report_is_one_line(pools):
    check_printed(pools(2).run(printed_report, {}), "")


@pytest.mark.parametrize(("pipeline_name", "sharded_tables"), [("native", True), ("none", False)])
def test_a_slow_rank_computes_and_the_others_wait(pools, pipeline_name, sharded_tables):
    check_spans(pools(2).run(spans, pipeline_name, sharded_tables, {}), 1)


@pytest.mark.parametrize("settings", [{}, {"equal_rows": False}])
@pytest.mark.parametrize("name", ["none", "native"])
def test_all_ranks_launch_the_same_collectives_in_the_same_order(pools, name, settings):
    check_launches(pools(3).run(launches, name, settings), 2)  # the job's, and the exchange's
