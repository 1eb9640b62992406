"""Reports of steps, and the time a rank computes, as opposed to the time it waits."""

from __future__ import annotations

import pytest

from tests.commons.pipeline.runs import check_printed, check_spans, printed_report, spans


def test_a_report_is_one_line(pools):
    check_printed(pools(2).run(printed_report, {}), "")


@pytest.mark.parametrize(("pipeline_name", "sharded_tables"), [("native", True), ("none", False)])
def test_a_slow_rank_computes_and_the_others_wait(pools, pipeline_name, sharded_tables):
    check_spans(pools(2).run(spans, pipeline_name, sharded_tables, {}), 1)
