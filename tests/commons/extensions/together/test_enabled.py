"""Extensions that rely on samples that move are named together where none does; others work."""

import numpy as np
import pytest

from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.pieces import Pieces
from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model, steps_of
from tests.on_ranks import on_ranks


def test_one_error_names_all_that_need_it():
    extensions = [LearnedCosts(), Pieces()]
    message = r"TokenShuffler\(enabled=False\) moves no samples, as LearnedCosts and Pieces would need"
    with pytest.raises(ValueError, match=message):
        TokenShuffler(enabled=False, extensions=extensions, equal_rows=False)


@on_ranks(2)
def test_the_others_work():
    extensions = [MicroBatches(40), Unshuffle(), Verification()]
    pipeline = pipeline_of(
        "none", *sharded_ranking_model(), TokenShuffler(enabled=False, extensions=extensions)
    )
    steps = list(steps_of(pipeline, [draw_histories(np.random.default_rng(0), 4)]))
    assert len(steps) == 1 and len(steps[0][2]) == pipeline.report.extensions["micro_batches"]
