"""Pieces of samples with the way back, verification, groups, and costs that are learned."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.distributed import Extension, ShufflePlan
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.pieces import Pieces
from commons.extensions.sample_groups import rebalance_groups
from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from tests.commons.distributed.loaded_batches import check_identical
from tests.commons.extensions.learned_costs.learning_pipelines import check_resumed
from tests.commons.extensions.pieces.cut_samples import (
    AheadBatch,
    ahead_batch,
    batch_of,
    imbalance_of,
    loaded_by,
    placed,
)
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts, is_cut
from tests.commons.extensions.pieces.ranking_on_pieces import sharded_model_for_pieces
from tests.commons.histories import TokenShuffler, drawn_lengths


def own_items(batch: AheadBatch) -> JaggedTensor:
    """Returns the items of each row without the one after them."""
    items, places = batch.features["item"], batch.pieces.rows
    parts = [
        items.values()[start : start + int(last - first)]
        for start, first, last in zip(
            items.offsets().tolist(), places["first_item"], places["last_item"], strict=False
        )
    ]
    lengths = places["last_item"] - places["first_item"]
    return JaggedTensor(torch.cat(parts), lengths=torch.from_numpy(lengths).int())


@pytest.mark.parametrize("num_real", [(5, 3), (4, 0, 5)])
def test_results_of_pieces_come_back_as_those_of_samples(pools, num_real):
    pool = pools(len(num_real))
    assert sum(pool.run(_there_and_back, num_real, seed)[0] for seed in range(4)) >= 2


def _there_and_back(num_real: tuple[int, ...], seed: int) -> bool:
    """Returns whether a sample was cut."""
    rank = dist.get_rank()
    rng = np.random.default_rng(seed + 100 * rank)
    batch = ahead_batch(rng, rng.integers(0, 12, num_real[rank]), 5 - num_real[rank])
    unshuffle = Unshuffle()
    shuffler = TokenShuffler(extensions=[unshuffle, Verification(), DrawnCuts(seed)], equal_rows=False)
    plan = shuffler.plan(batch)
    arrived = shuffler.exchange(batch, plan)
    if not is_cut(plan):
        return False
    items, number = unshuffle.unshuffle((own_items(arrived), arrived.number), plan)
    check_identical((items, number), (batch.features["item"], batch.number))
    return True


def test_pieces_are_not_divided_into_micro_batches():
    message = "pieces excludes micro_batches: a sample's pieces must run at once"
    with pytest.raises(ValueError, match=message):
        TokenShuffler(equal_rows=False, extensions=[MicroBatches(8), Pieces()])


def test_one_error_names_all_extensions_that_need_samples_to_move():
    message = r"enabled=False\) moves no samples, as LearnedCosts and Pieces would need"
    with pytest.raises(ValueError, match=message):
        TokenShuffler(enabled=False, extensions=[LearnedCosts(), Pieces()], equal_rows=False)


def _groups_per_rank(groups: np.ndarray, plan: ShufflePlan) -> int:
    return len(np.unique([groups[plan.rows.sample_of], plan.destination], axis=1).T)


def test_pieces_under_max_tokens_keep_groups_together():
    """With groups nothing is refused that has a place without, and ranks share fewer groups."""
    apart = together = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        rows, num_ranks = rng.integers(2, 9, 2).tolist()
        lengths = drawn_lengths(np.random.default_rng(seed), rows * num_ranks)
        samples, cutting = loaded_by([rows] * num_ranks, batch_of("history", lengths))
        num_samples = len(samples.workloads)
        groups = rng.integers(0, num_samples // 3 + 1, num_samples)
        with_groups = replace(samples, columns={"groups": groups}, partitioner=rebalance_groups)
        cap = int(samples.tokens.sum() / samples.num_ranks * rng.choice([1.02, 1.1, 1.3]))
        try:
            alone = placed(samples, cutting, max_tokens=cap)
        except ValueError:
            continue
        plan = placed(with_groups, cutting, max_tokens=cap)
        assert np.array_equal(plan.rows.columns["groups"], groups[plan.rows.sample_of])
        assert np.bincount(plan.destination, plan.rows.tokens).max() <= cap
        assert imbalance_of(plan) <= max(imbalance_of(alone), 1.011)
        apart += _groups_per_rank(groups, alone)
        together += _groups_per_rank(groups, plan)
    assert 0 < together < 0.9 * apart


def _splitting() -> list[Extension]:
    return [Pieces(), Verification()]


def test_a_resumed_pipeline_plans_as_the_one_that_went_on(pools):
    pools(2).run(check_resumed, "native", sharded_model_for_pieces, _splitting)
