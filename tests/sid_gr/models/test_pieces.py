"""An evaluation on pieces of samples is that of the whole samples on one process."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.datasets import SIDBatch
from commons.distributed import BatchShufflerFactory, ShufflePlan
from commons.perf_model import TransformerConfig, transformer_flops
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts, GivenCuts
from tests.on_ranks import on_ranks
from tests.sid_gr.internals import SIDGRBatchShuffler
from tests.sid_gr.sid_samples import CONTEXTUAL_VOCABULARY, ITEM_CODES, Sample, sid_batch, sid_gr_model

ROWS = 4
FLOPS = partial(transformer_flops, TransformerConfig(2, 12, 4, 2, 5, 48))


def _samples(seed: int, count: int) -> list[Sample]:
    """Draws samples with a history, candidates, and contextual ids or none."""
    rng = np.random.default_rng(seed)
    draw = partial(rng.integers, 0)
    return [
        Sample(
            draw(len(ITEM_CODES), draw(9)).tolist(),
            draw(len(ITEM_CODES), 1 + draw(4)).tolist(),
            draw(CONTEXTUAL_VOCABULARY, draw(3)).tolist(),
        )
        for _ in range(count)
    ]


def _starts(plan: ShufflePlan, samples: list[Sample]) -> set[int]:
    """Returns where later pieces start: in the history, -1; at the first candidate, 0; at a later one, 1."""
    first_items = plan.rows.columns["pieces"]["first_item"]
    history = np.array([len(sample.history) for sample in samples])[plan.rows.sample_of]
    return set(np.sign(first_items - history)[first_items > 0].tolist())


def _retrieved(model: torch.nn.Module, batch: SIDBatch) -> list[torch.Tensor]:
    with torch.no_grad():
        loss, output = model.eval()(batch)
    return [loss, output.items, output.scores, output.targets]


def _check_draws(num_real: tuple[int, ...]) -> tuple[set[int], bool]:
    """Compares with one process; returns where pieces started, and whether a rank had none."""
    by_rank = [_samples(rank, count) for rank, count in enumerate(num_real)]
    samples, rank = [sample for loaded in by_rank for sample in loaded], dist.get_rank()
    cuts = DrawnCuts(0)
    shuffler = BatchShufflerFactory.create("sid_gr", flops=FLOPS, extensions=[cuts], equal_rows=False)
    batch, whole = sid_batch(by_rank[rank], ROWS), sid_batch(samples)
    model, half = sid_gr_model(), sid_gr_model(dtype=torch.bfloat16)
    retrieved = _retrieved(model, whole)
    starts, has_empty_rank = set(), False
    for cuts.seed in range(12):
        plan = shuffler.plan(batch)
        mine = shuffler.exchange(batch, plan)
        assert mine.to(torch.device("cpu")).pieces is mine.pieces
        if mine.pieces is None:
            continue
        starts |= _starts(plan, samples)
        has_empty_rank |= not plan.num_placed.all()
        _check_retrieval(_retrieved(model, mine), retrieved, plan, rank)
        loss = _retrieved(half, mine)[0]
        dist.all_reduce(loss)
        assert float(loss) == pytest.approx(float(retrieved[0]), rel=0.02)
    return starts, has_empty_rank


def _check_retrieval(
    got: list[torch.Tensor], whole: list[torch.Tensor], plan: ShufflePlan, rank: int
) -> None:
    """Checks that every sample has one row, on the rank where it ends."""
    pieces = plan.rows.columns["pieces"]
    ends = pieces["last_item"] == pieces["num_items"]
    mine = plan.rows.sample_of[ends & (plan.destination == rank)]
    loss, items, scores, targets = got
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, whole[0])
    assert items.tolist() == whole[1][mine].tolist()
    torch.testing.assert_close(scores, whole[2][mine], rtol=1e-5, atol=1e-5)
    assert targets.tolist() == whole[3][mine].tolist()


@pytest.mark.parametrize("num_real", [(4, 2), (3, 0, 4)])
def test_pieces_retrieve_as_whole_samples_do(pools, num_real):
    assert pools(len(num_real)).run(_check_draws, num_real)[0] == ({-1, 0, 1}, True)


class _OtherTokens(SIDGRBatchShuffler):
    def get_tokens(self, batch: Any) -> torch.Tensor:
        tokens = batch.num_tokens()
        return torch.where(tokens < tokens.max(), 2 * tokens, tokens)


@on_ranks(2)
def test_what_pieces_do_not_allow_is_refused():
    # The sample that is cut is counted right, or planning would refuse it.
    cuts = GivenCuts(lambda *_: (np.array([0]), np.array([2]), np.array([0, 1, 0, 1, 1])))
    shuffler = _OtherTokens(FLOPS, extensions=[cuts], equal_rows=False)
    mine = shuffler.shuffle(sid_batch([Sample([1, 2], [3], []), Sample([1], [2], [])]))
    with pytest.raises(ValueError, match=r"let the shuffler's get_tokens return SIDBatch.num_tokens\(\)$"):
        sid_gr_model()(mine)
    with pytest.raises(ValueError, match=r"select rows before the exchange$"):
        mine.index_select([0])
