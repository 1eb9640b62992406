"""A step, or an evaluation, on pieces of samples is that of the whole samples on one process."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.datasets import SIDBatch
from commons.distributed import BatchShufflerFactory, ShufflePlan
from commons.perf_model import TransformerConfig, transformer_flops
from sid_gr.batch_shuffler import SIDGRBatchShuffler
from tests.commons.distributed.counted_collectives import no_synchronization
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts, GivenCuts
from tests.on_ranks import on_ranks
from tests.sid_gr.sid_samples import CONTEXTUAL_VOCABULARY, ITEM_CODES, Sample, sid_batch, sid_gr_model

ROWS = 4
SEEDS = range(12)
FLOPS = partial(transformer_flops, TransformerConfig(2, 12, 4, 2, 5, 48))
# Kinds of pieces that the draws have to meet.
KINDS = {
    "one item",
    "starts in the history",
    "starts at the first candidate",
    "starts at a later candidate",
    "has no candidate",
    "shares its rank with another of its sample",
}


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


def _kinds(plan: ShufflePlan, samples: list[Sample]) -> set[str]:
    """Returns which of `KINDS` the plan's pieces are, and the kinds of ranks that it has."""
    kinds, seen = set(), set()
    columns = plan.rows.sample_of.tolist(), plan.destination.tolist(), plan.rows.columns["pieces"]
    for sample, rank, piece in zip(*columns, strict=True):
        first, last, history = piece["first_item"], piece["last_item"], len(samples[sample].history)
        if last - first == piece["num_items"]:
            continue
        kinds |= {"one item"} if last - first == 1 else set()
        kinds |= {"has no candidate"} if last <= history else set()
        if first:
            side = np.sign(first - history)
            starts = {-1: "in the history", 0: "at the first candidate", 1: "at a later candidate"}[side]
            kinds.add(f"starts {starts}")
        kinds |= {"shares its rank with another of its sample"} if (sample, rank) in seen else set()
        seen.add((sample, rank))
    for rank in range(plan.num_ranks):
        kinds |= {"rank without a row"} if not plan.num_placed[rank] else set()
        kinds |= {"rank without a piece"} if rank not in {holder for _, holder in seen} else set()
    return kinds


def _gradients(model: torch.nn.Module, batch: SIDBatch) -> list[torch.Tensor]:
    loss, _ = model.train()(batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def _retrieved(model: torch.nn.Module, batch: SIDBatch) -> list[torch.Tensor]:
    with torch.no_grad():
        loss, output = model.eval()(batch)
    return [loss, output.items, output.scores, output.targets]


def _check_draws(num_real: tuple[int, ...]) -> set[str]:
    """Compares with one process; returns the kinds of pieces and ranks that were met."""
    by_rank = [_samples(rank, count) for rank, count in enumerate(num_real)]
    samples, rank = [sample for loaded in by_rank for sample in loaded], dist.get_rank()
    cuts = DrawnCuts(0)
    shuffler = BatchShufflerFactory.create("sid_gr", flops=FLOPS, extensions=[cuts], equal_rows=False)
    batch, whole = sid_batch(by_rank[rank], ROWS), sid_batch(samples)
    model, half = sid_gr_model(), sid_gr_model(dtype=torch.bfloat16)
    expected, retrieved = _gradients(model, whole), _retrieved(model, whole)
    kinds = set()
    for cuts.seed in SEEDS:
        plan = shuffler.plan(batch)
        mine = shuffler.exchange(batch, plan)
        assert mine.to(torch.device("cpu")).pieces is mine.pieces
        if mine.pieces is None:
            continue
        kinds |= _kinds(plan, samples)
        with no_synchronization():
            gradients = _gradients(model, mine)
        for got, wanted in zip(gradients, expected, strict=True):
            dist.all_reduce(got)
            assert float((got - wanted).norm()) <= 1e-5 * float(wanted.norm())
        _check_retrieval(_retrieved(model, mine), retrieved, plan, rank)
        loss = _gradients(half, mine)[0]
        dist.all_reduce(loss)
        assert float(loss) == pytest.approx(float(expected[0]), rel=0.02)
    return kinds


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
def test_pieces_learn_and_retrieve_as_whole_samples_do(pools, num_real):
    kinds = pools(len(num_real)).run(_check_draws, num_real)[0]
    assert kinds == {*KINDS, "rank without a row", "rank without a piece"}


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
    message = (
        r"and the plan that cut samples counts.*let the shuffler's get_tokens return SIDBatch.num_tokens\(\)$"
    )
    with pytest.raises(ValueError, match=message):
        sid_gr_model()(mine)
    with pytest.raises(ValueError, match=r"select rows before the exchange$"):
        mine.index_select([0])
