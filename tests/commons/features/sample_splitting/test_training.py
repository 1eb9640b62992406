"""A model that fetches keys and values for its pieces learns from them what it learns from whole samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.commons.features.sample_splitting.drawn_cuts import drawn_cuts
from tests.commons.features.sample_splitting.ranking_on_pieces import RankingOnPieces
from tests.commons.histories import HistoryBatch, TokenShuffler, draw_histories

SEEDS = range(8)


def _summed_gradients(batch: HistoryBatch) -> list[torch.Tensor]:
    """Returns the loss and gradients of all ranks together."""
    model = RankingOnPieces()
    loss = model(batch)[0].sum()
    summed = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for value in summed:
        dist.all_reduce(value)
    return summed


def _differences() -> list[Any]:
    """Returns for each draw of cuts whether a sample is cut, and the relative differences."""
    batch = draw_histories(np.random.default_rng(dist.get_rank()), 5)
    expected, results = _summed_gradients(batch), []
    for seed in SEEDS:
        shuffler = TokenShuffler(split=True, equal_rows=False)
        shuffler.planner.cuts = partial(drawn_cuts, seed=seed)
        plan = shuffler.plan(batch)
        got = _summed_gradients(shuffler.exchange(batch, plan))
        differences = [
            float((one - other).norm() / other.norm()) for one, other in zip(got, expected, strict=True)
        ]
        results.append((plan.rows.columns["pieces"] is not None, max(differences)))
    return results


def test_gradients_of_pieces_are_those_of_whole_samples(pools):
    for results in pools(3).run(_differences):
        assert sum(is_cut for is_cut, _ in results) > len(SEEDS) / 2
        assert max(difference for _, difference in results) < 1e-5
