"""Steps in micro-batches: gradients, lookups, reductions, and memory."""

import itertools
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from commons.extensions.micro_batches import run_micro_batches
from tests.commons.extensions.micro_batches.divided import in_micro_batches
from tests.commons.histories import TokenShuffler, draw_histories, histories
from tests.commons.pipeline.ranking_pipelines import (
    RankingModel,
    pipeline_of,
    ranking_pipeline,
    sharded_ranking_model,
)
from tests.commons.pipeline.runs import check_spans, check_summed, spans, summed_outputs
from tests.on_ranks import on_ranks

both_pipelines = pytest.mark.parametrize("name", ["none", "native"])
CAP = 24


@both_pipelines
@on_ranks(2)
def test_tables_are_looked_up_and_gradients_reduced_as_often_as_without(name):
    counts = []
    for cap in (None, CAP):
        pipeline = ranking_pipeline(name, TokenShuffler(extensions=in_micro_batches(cap)))
        (replicated,) = (m for m in pipeline._model.modules() if isinstance(m, DistributedDataParallel))
        reduced = []

        def counting_hook(group, bucket, reduced=reduced):
            reduced.append(bucket.index())
            return allreduce_hook(group, bucket)

        replicated.register_comm_hook(None, counting_hook)
        rng = np.random.default_rng(dist.get_rank())
        loader = iter([draw_histories(rng, 6) for _ in range(5)])
        for _ in range(2):
            pipeline.progress(loader)
        reduced.clear()
        compute = ShardedEmbeddingCollection.compute_and_output_dist
        micro_batches = 0
        with mock.patch.object(
            ShardedEmbeddingCollection, "compute_and_output_dist", autospec=True, side_effect=compute
        ) as lookups:
            for _ in range(3):
                pipeline.progress(loader)
                micro_batches += pipeline.report.extensions.get("micro_batches", 1)
        pipeline.reset()
        counts.append((lookups.call_count, len(reduced), micro_batches))
    (*whole, once), (*divided, several) = counts
    assert divided == whole and min(whole) > 0
    assert once == 3 and several > 6


class _Kept:
    """Counts the most bytes kept for backward passes at a time, each storage once."""

    def __init__(self) -> None:
        self.peak = 0
        self._users: Counter[tuple[int, int]] = Counter()

    def keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        storage = tensor.untyped_storage()
        key, held = (storage.data_ptr(), storage.nbytes()), _Held()
        self._users[key] += 1
        weakref.finalize(held, self._users.subtract, [key])
        self.peak = max(self.peak, sum(size for (_, size), users in self._users.items() if users))
        return tensor, held


class _Held:
    """Lives as long as autograd keeps a tensor."""


@both_pipelines
@on_ranks(2)
def test_activations_grow_with_the_cap_and_not_with_the_batch(name):
    model, optimizer = sharded_ranking_model()

    def peak(rows: int, cap: int | None) -> int:
        """Returns the most bytes of activations in a step of equal samples."""
        pipeline = pipeline_of(name, model, optimizer, TokenShuffler(extensions=in_micro_batches(cap)))
        kept, forward = _Kept(), pipeline._stage.forward

        def watched(batch: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda saved: saved[0]):
                return forward(batch)

        pipeline._stage.forward = watched
        pipeline.progress(iter([histories([10] * rows)]))
        pipeline.reset()
        return kept.peak

    per_sample = (peak(64, None) - peak(16, None)) / 48
    twos = peak(64, 2 * 21)  # a sample has 21 tokens
    assert twos - peak(16, 2 * 21) <= 0.05 * 48 * per_sample  # only the ids of the lookups grow
    assert peak(64, 8 * 21) - twos == pytest.approx(6 * per_sample, rel=0.05)


def test_a_model_alone_runs_in_micro_batches():
    model = RankingModel()
    batch = draw_histories(np.random.default_rng(1), 12)
    gradients = []
    for cap in (None, CAP):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        pipeline = pipeline_of("none", model, optimizer, TokenShuffler(extensions=in_micro_batches(cap)))
        outputs = pipeline.progress(iter([batch]))
        assert cap is None or len(outputs) > 1
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, divided in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, divided)


def test_a_loop_without_micro_batches_names_what_is_missing():
    shuffler, batch = TokenShuffler(), draw_histories(np.random.default_rng(1), 4)
    plan = shuffler.plan(batch)
    with pytest.raises(ValueError, match=r"give its shuffler extensions=\[MicroBatches"):
        run_micro_batches(RankingModel(), shuffler.exchange(batch, plan), shuffler, plan, "sum")


@pytest.mark.parametrize("cap", [None, 10**6])
def test_a_step_that_raises_can_be_tried_again_with_its_own_plan(cap):
    model, calls = RankingModel(), itertools.count(1)

    def fail_at_the_second_call(*_: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("out of memory")

    model.register_forward_pre_hook(fail_at_the_second_call)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipeline_of("none", model, optimizer, TokenShuffler(extensions=in_micro_batches(cap)))
    rng = np.random.default_rng(3)
    batches = [draw_histories(rng, 6) for _ in range(3)]
    loader, tokens = iter(batches), []
    for fails in (False, True, False, False):
        with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
            pipeline.progress(loader)
            tokens.append(pipeline.loss_tokens)
    assert tokens == [int(batch.num_loss_tokens().sum()) for batch in batches]
    assert len(set(tokens)) == 3


def _of_optimizer_step(cap: int | None, how: str) -> list[torch.Tensor]:
    """Returns dense gradients and tables after a step of three batches, whose losses are scaled as told."""
    model, _ = sharded_ranking_model(0.5)
    shuffler = TokenShuffler(extensions=in_micro_batches(cap))
    rng = np.random.default_rng(dist.get_rank())
    batches = [histories(rng.integers(3, 12, 6), rng) for _ in range(3)]
    plans = [shuffler.plan(batch) for batch in batches]
    step_plans = plans if how == "of all" else None
    for number, (batch, plan) in enumerate(zip(batches, plans, strict=True)):
        exchanged, factor = shuffler.exchange(batch, plan), 0.5**number
        if cap is None:
            loss = shuffler.scale(model(exchanged)[0], plan, "sum", step_plans=step_plans)
        else:
            assert plan.num_parts > 1
            scale = shuffler.scale(torch.ones(()), plan, "sum") if how == "by a number" else None
            loss, *_ = run_micro_batches(
                model, exchanged, shuffler, plan, "sum", scale, step_plans=step_plans
            )
        (loss * factor).backward()
    tables = [value for value in model.state_dict().values() if hasattr(value, "local_shards")]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert tables and gradients
    return gradients + [shard.tensor for table in tables for shard in table.local_shards()]


@pytest.mark.parametrize("how", ["one by one", "of all", "by a number"])
@on_ranks(2)
def test_factors_and_accumulation_give_the_gradients_of_whole_batches(how):
    for expected, got in zip(_of_optimizer_step(None, how), _of_optimizer_step(CAP, how), strict=True):
        assert float((got - expected).norm()) <= 1e-5 * float(expected.norm())


def test_outputs_add_up_to_those_of_all_samples(pools):
    check_summed(pools(2).run(summed_outputs, {"extensions": in_micro_batches(1)}))


def test_a_slow_rank_computes_and_the_others_wait(pools):
    check_spans(pools(2).run(spans, "none", True, {"extensions": in_micro_batches(40)}), 2)
