"""Features that rely on samples that move are named together where none does; others work."""

import numpy as np
import pytest

from commons.features.learned_costs import LearnedCosts
from commons.features.micro_batches import MicroBatches
from commons.features.sample_splitting import SplitSamples
from commons.features.unshuffle import Unshuffle
from commons.features.verification import Verification
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model, steps_of
from tests.on_ranks import on_ranks


def test_one_error_names_all_that_need_it():
    features = [LearnedCosts(), SplitSamples()]
    message = r"TokenShuffler\(enabled=False\) moves no sample, which LearnedCosts and SplitSamples rely on"
    with pytest.raises(ValueError, match=message):
        TokenShuffler(enabled=False, features=features, equal_rows=False)


@on_ranks(2)
def test_the_others_work():
    features = [MicroBatches(40), Unshuffle(), Verification()]
    pipeline = pipeline_of("none", *sharded_ranking_model(), TokenShuffler(enabled=False, features=features))
    steps = list(steps_of(pipeline, [draw_histories(np.random.default_rng(0), 4)]))
    assert len(steps) == 1 and len(steps[0][2]) == pipeline.report.features["micro_batches"]
