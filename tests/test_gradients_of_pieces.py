"""Cutting samples into pieces changes nothing that a step learns."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.distributed import BatchShuffler, BatchShufflerFactory, Extension
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.pieces import Pieces
from commons.extensions.verification import Verification
from commons.perf_model import Cost
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts, is_cut
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.gradient_comparison import Comparison, check_equal, comparison, steps
from tests.gradient_models import CASES, in_turn
from tests.on_ranks import on_ranks
from tests.process_pool import rank_device


def _shuffler(config: dict[str, Any], *extensions: Extension, **settings: Any) -> BatchShuffler:
    return BatchShufflerFactory.create_from_config(
        {**config, "equal_rows": False, "extensions": extensions, **settings}
    )


def compare(name: str, pipeline: str, num_real: tuple[int, ...], seeds: list[int]) -> list[Comparison]:
    """Returns comparisons of drawn cuts with a plain step; the last one of cuts that are worked out."""
    case = CASES[name]
    batch = case.batch(num_real, True)
    plain = steps(case.make_model(), pipeline, BatchShufflerFactory.create("identity"), [batch])
    results = []
    for seed in [*seeds, None]:
        extensions = [Pieces() if seed is None else DrawnCuts(seed)]
        extensions += [Verification()] if seed == seeds[0] else []
        shuffler = _shuffler(case.shuffler, *extensions)
        results.append(comparison(plain, steps(case.make_model(), pipeline, shuffler, [batch])))
    return results


@settings(max_examples=1)
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
@pytest.mark.parametrize(("name", "pipeline", "num_real"), in_turn(CASES, [(6, 6), (6, 3, 0), (2, 6, 1, 4)]))
def test_gradients_of_pieces_are_those_of_whole_samples(pools, name, pipeline, num_real, seeds):
    ranks = pools(len(num_real)).run(compare, name, pipeline, num_real, seeds)
    for results in zip(*ranks, strict=True):
        check_equal(results, has_loss=True)


def _learned_state(config: dict[str, Any], batch: BaseBatch) -> dict[str, bytes]:
    """Returns what a shuffler learns from steps in which its last column takes all the time."""
    learned = LearnedCosts()
    shuffler = _shuffler(config, Pieces(), learned)
    for step in range(40):
        plan = shuffler.plan(batch)
        noise = np.random.default_rng(step).lognormal(0, 0.01, plan.num_ranks)
        learned.record(plan, float(((1e-3 + 1e-8 * plan.counts[:, -1]) * noise)[dist.get_rank()]))
    return learned.state(plan)


def compare_costs(name: str, pipeline: str) -> list[Comparison]:
    """Returns comparisons with a plain step, of pieces by learned and by calibrated costs."""
    case, rng = CASES[name], np.random.default_rng(dist.get_rank())
    lengths = (300, 5) if dist.get_rank() == 0 else (20, 30, 9)  # which no placement of whole ones balances
    batch = case.make_batch([case.make_sample(rng, items, True) for items in lengths])
    plain = steps(case.make_model(), pipeline, BatchShufflerFactory.create("identity"), [batch])
    learned = LearnedCosts()
    by_learned = _shuffler(case.shuffler, Pieces(), Verification(), learned)
    learned.load_state(_learned_state(case.shuffler, batch))
    cost = Cost((0.0, 0.0, 1e-3, 1.0))
    results = []
    for shuffler in (by_learned, _shuffler(case.shuffler, Pieces(), Verification(), cost=cost)):
        plan = shuffler.plan(batch)
        assert is_cut(plan) and plan.predicted_seconds is not None
        results.append(comparison(plain, steps(case.make_model(), pipeline, shuffler, [batch])))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("name", "pipeline"), [("ranking", "native"), ("sid_gr, last item", "none")])
def test_gradients_of_pieces_by_fitted_costs_are_those_of_whole_samples(pools, name, pipeline, num_ranks):
    ranks = pools(num_ranks).run(compare_costs, name, pipeline)
    for results in zip(*ranks, strict=True):
        check_equal(results, has_loss=True)


def evaluated(name: str, num_real: tuple[int, ...]) -> list[np.ndarray]:
    """Returns this rank's predictions in an evaluation, of whole samples and of pieces."""
    case = CASES[name]
    outputs = []
    for split in (False, True):
        shuffler = _shuffler(case.shuffler, *([DrawnCuts(1)] if split else []))
        model, optimizer = shard_model(case.make_model(), OptimizerArgs("sgd", 0.1), rank_device())
        pipeline = pipeline_of("native", model, optimizer, shuffler)
        model.eval()
        with torch.no_grad():
            output = pipeline.progress(iter([case.batch(num_real, True)]))
        assert is_cut(pipeline.plan) == split
        values, labels = vars(output).values()
        outputs.append(torch.cat([labels[:, None].float(), values], 1).cpu().numpy())
        pipeline.reset()
    return outputs


@pytest.mark.parametrize("name", ["ranking", "ranking with candidates and tasks", "retrieval"])
def test_predictions_of_pieces_are_those_of_whole_samples(pools, name):
    whole, pieces = (
        np.concatenate(by_rank) for by_rank in zip(*pools(2).run(evaluated, name, (6, 5)), strict=True)
    )
    assert whole.shape == pieces.shape and len(whole)
    for label in np.unique(whole[:, 0]):
        whole_rows, piece_rows = (np.sort(of[of[:, 0] == label], 0) for of in (whole, pieces))
        assert piece_rows == pytest.approx(whole_rows, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["ranking", "retrieval", "sid_gr, all items"])
@on_ranks(2)
def test_pieces_take_two_collectives_per_layer(name):
    case = CASES[name]
    shuffler = _shuffler(case.shuffler, DrawnCuts(1))
    batch = case.batch((6, 5), True)
    plan = shuffler.plan(batch)
    batch, model = shuffler.exchange(batch, plan), case.make_model()
    with recorded_collectives() as calls:
        loss, _ = model(batch)
        loss.backward()
    calls = [name for name, _ in calls]
    assert calls == ["all_to_all_single"] * 4  # two layers, forward and backward
