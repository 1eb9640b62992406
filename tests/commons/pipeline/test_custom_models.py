"""Custom batches and models in all pipelines."""

from __future__ import annotations

import pytest

from tests.commons.pipeline.click_models import OfDict, check_trained, trained
from tests.commons.pipeline.ranking_pipelines import pipeline_of


@pytest.mark.parametrize(
    ("kind", "pipeline_name", "arguments"),
    [
        ("torchrec", "native", {}),
        ("dict", "native", {"pipeline_postproc": True}),
        ("pair", "native", {"enqueue_batch_after_forward": True}),
        ("deep", "native", {"dmp_collection_sync_interval_batches": None, "apply_jit": False}),
        ("deep", "none", {}),
        ("padded", "native", {}),
    ],
)
def test_any_batch_trains_in_a_pipeline_as_in_one_process(pools, kind, pipeline_name, arguments):
    check_trained(pools(2).run(trained, kind, pipeline_name, arguments, {}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("custom_model_fwd", "the stage calls the model"),
        ("enable_inplace_copy_batch", "it copies batches past the exchange"),
    ],
)
def test_arguments_that_bypass_the_stage_are_refused(name, reason):
    with pytest.raises(ValueError, match=f'pipeline "native" takes no {name}: {reason}'):
        pipeline_of("native", OfDict(), None, None, **{name: True})
