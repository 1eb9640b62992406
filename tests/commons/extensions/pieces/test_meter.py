"""The meter counts what is cut on all ranks, also where they exchange in sets."""

from __future__ import annotations

import torch.distributed as dist

from commons.balance_meter import BalanceMeter
from commons.extensions.pieces import Pieces
from tests.commons.extensions.pieces.ranking_on_pieces import sharded_model_for_pieces
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_samples_that_a_set_has_cut_are_counted_once_on_all_ranks():
    group = [dist.new_group(ranks) for ranks in ([0], [1, 2])][dist.get_rank() > 0]
    shuffler = TokenShuffler(group, equal_rows=False, extensions=[Pieces()])
    pipeline = pipeline_of("none", *sharded_model_for_pieces(), shuffler)
    meter = BalanceMeter(pipeline)
    pipeline.progress(iter([histories([300, 3, 4] if dist.get_rank() == 2 else [3, 4])]))
    meter.add()
    figures = meter.close()
    assert (figures["samples_cut"], figures["pieces"]) == (1, 2) and "imbalance_bound" not in figures
