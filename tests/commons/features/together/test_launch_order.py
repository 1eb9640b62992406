"""All ranks launch the collectives of several features in one order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from commons.distributed import BatchShuffler
from tests.commons.features.micro_batches.divided import in_micro_batches
from tests.commons.features.sample_splitting.drawn_cuts import drawn_cuts
from tests.commons.features.sample_splitting.ranking_on_pieces import sharded_model_for_pieces
from tests.commons.pipeline.launches import Launching, check_launches, launches


def _unshuffles(shuffler: BatchShuffler, training: Any) -> None:
    shuffler.unshuffle(torch.arange(training.num_samples), training.plan)


def _cuts(shuffler: BatchShuffler) -> None:
    shuffler.planner.cuts = partial(drawn_cuts, seed=0)


WHOLE = Launching(after_step=_unshuffles)
IN_PIECES = Launching(sharded_model_for_pieces, _cuts, _unshuffles)


@pytest.mark.parametrize(
    ("settings", "by", "num_groups"),
    [
        ({}, WHOLE, 2),
        ({"features": in_micro_batches(16), "verify": True}, WHOLE, 2),
        ({"split": True, "equal_rows": False}, IN_PIECES, 3),
    ],
    ids=["whole", "micro-batches", "pieces"],
)
@pytest.mark.parametrize("name", ["none", "native"])
def test_all_ranks_launch_the_same_collectives_in_the_same_order(pools, name, settings, by, num_groups):
    # The job's, the exchange's, and that of pieces.
    check_launches(pools(3).run(launches, name, settings, by), num_groups)
