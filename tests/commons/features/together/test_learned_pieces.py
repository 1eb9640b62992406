"""Samples are cut by costs that are learned."""

from __future__ import annotations

from tests.commons.features.learned_costs.learning_pipelines import check_resumed
from tests.commons.features.sample_splitting.ranking_on_pieces import sharded_model_for_pieces


def test_a_resumed_pipeline_plans_as_the_one_that_went_on(pools):
    pools(2).run(check_resumed, "native", {"split": True, "verify": True}, sharded_model_for_pieces)
