"""All ranks launch the collectives of several extensions in one order."""

from typing import Any

import pytest
import torch

from commons.distributed import BatchShuffler
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts
from tests.commons.extensions.pieces.ranking_on_pieces import sharded_model_for_pieces
from tests.commons.pipeline.launches import check_launches, launches
from tests.commons.pipeline.ranking_pipelines import sharded_ranking_model


def _unshuffles(shuffler: BatchShuffler, training: Any) -> None:
    (unshuffle,) = (extension for extension in shuffler.extensions if isinstance(extension, Unshuffle))
    unshuffle.unshuffle(torch.arange(training.num_samples), training.plan)


@pytest.mark.parametrize(
    ("settings", "make_model", "num_groups"),
    [
        ({"extensions": [Unshuffle(), MicroBatches(16), Verification()]}, sharded_ranking_model, 2),
        ({"extensions": [Unshuffle(), DrawnCuts(0)], "equal_rows": False}, sharded_model_for_pieces, 3),
    ],
    ids=["micro-batches", "pieces"],
)
@pytest.mark.parametrize("name", ["none", "native"])
def test_all_ranks_launch_the_same_collectives_in_the_same_order(
    pools, name, settings, make_model, num_groups
):
    # The job's, the exchange's, and that of pieces.
    check_launches(pools(3).run(launches, name, settings, make_model, _unshuffles), num_groups)
