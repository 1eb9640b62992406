"""Steps in micro-batches: gradients, lookups, reductions, and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from commons.distributed import BatchShufflerFactory
from commons.pipeline import run_micro_batches
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import QuickShuffler
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    TokenShuffler,
    draw_histories,
    equal_histories,
    pipeline_of,
    ranking_pipeline,
    sharded_ranking_model,
    steps_of,
)
from tests.hstu.hstu_samples import ranking_model

both_pipelines = pytest.mark.parametrize("name", ["none", "native"])
CAP = 24


def _lookups_and_reductions(name: str) -> list[tuple[int, int, int]]:
    """Returns, for whole batches and for micro-batches, table lookups, reduced buckets, and micro-batches.

    They are those of three steps after the first two.
    """
    counts = []
    for cap in (None, CAP):
        pipeline = ranking_pipeline(name, TokenShuffler(max_tokens_per_micro_batch=cap))
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
                micro_batches += pipeline.report.num_micro_batches
        pipeline.reset()
        counts.append((lookups.call_count, len(reduced), micro_batches))
    return counts


@both_pipelines
def test_tables_are_looked_up_and_gradients_reduced_as_often_as_without(pools, name):
    for (*whole, once), (*divided, several) in pools(2).run(_lookups_and_reductions, name):
        assert divided == whole and min(whole) > 0
        assert once == 3 and several > 6


class _Kept:
    """A tensor kept for the backward pass, counted while it is kept."""

    def __init__(self, tensor: torch.Tensor, count: _CountKept) -> None:
        self.tensor = tensor
        self._count = count
        self._key = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        count.change(self._key, 1)

    def __del__(self) -> None:
        self._count.change(self._key, -1)


class _CountKept:
    """Counts the most bytes kept for backward passes at a time, each storage once."""

    def __init__(self) -> None:
        self._users: Counter[tuple[int, int]] = Counter()
        self._bytes = self.peak = 0

    def change(self, key: tuple[int, int], users: int) -> None:
        before = self._users[key]
        self._users[key] += users
        if 0 in (before, self._users[key]):
            self._bytes += users * key[1]
        self.peak = max(self.peak, self._bytes)


def _kept_for_backward(name: str, cases: list[tuple[int, int | None]]) -> list[int]:
    """Returns for rows and caps the bytes of activations at the peak of a step of equal samples."""
    model, optimizer = sharded_ranking_model()
    peaks = []
    for rows, cap in cases:
        pipeline = pipeline_of(name, model, optimizer, TokenShuffler(max_tokens_per_micro_batch=cap))
        kept = _CountKept()
        forward = pipeline._stage.forward

        def watched(model, batch, kept=kept, forward=forward):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: _Kept(tensor, kept), lambda saved: saved.tensor
            ):
                return forward(model, batch)

        pipeline._stage.forward = watched
        pipeline.progress(iter([equal_histories(rows, 10)]))
        pipeline.reset()
        peaks.append(kept.peak)
    return peaks


@both_pipelines
def test_activations_grow_with_the_cap_and_not_with_the_batch(pools, name):
    cases = [(64, None), (16, None), (64, 2 * 21), (16, 2 * 21), (64, 8 * 21)]  # a sample has 21 tokens
    of_ranks = pools(2).run(_kept_for_backward, name, cases)
    whole_64, whole_16, twos_64, twos_16, eights_64 = map(max, zip(*of_ranks, strict=True))
    per_sample = (whole_64 - whole_16) / 48
    # Only the ids of the lookups grow.
    assert twos_64 - twos_16 <= 0.03 * 48 * per_sample
    assert eights_64 - twos_64 == pytest.approx(6 * per_sample, rel=0.05)


@dataclass
class Clicks(BaseBatch):
    """Pooled features, a dense one, and a label."""

    dense: torch.Tensor | None = None


class ClickShuffler(QuickShuffler):
    """The workload is the number of ids."""

    def get_workloads(self, batch: Clicks) -> torch.Tensor:
        return batch.num_tokens()


class ClickModel(nn.Module):
    """Pooled embeddings and dense features to a click."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=50, feature_names=[name])
                for name in ("a", "b")
            ]
        )
        self.head = nn.Linear(8 + 2, 1)

    def forward(self, batch: Clicks) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.tables(batch.features).values()
        logits = self.head(torch.cat([pooled, batch.dense], 1))[:, 0]
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses[: batch.num_samples], logits.detach()


class RebuildingClickModel(ClickModel):
    """Looks up features that are no field of the batch."""

    def forward(self, batch: Clicks) -> tuple[torch.Tensor, torch.Tensor]:
        features = batch.features
        batch.features = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
        return super().forward(batch)


def _clicks(rows: int, num_real: int) -> Clicks:
    rng = np.random.default_rng(dist.get_rank())
    lengths = torch.from_numpy(rng.integers(0, 20 if dist.get_rank() else 5, (2, rows)))
    lengths[:, num_real:] = 0
    lengths = lengths.view(-1)
    ids = torch.from_numpy(rng.integers(0, 50, int(lengths.sum())))
    labels = torch.from_numpy(rng.integers(0, 2, rows)).float()
    labels[num_real:] = 0
    return Clicks(
        features=KeyedJaggedTensor(["a", "b"], ids, lengths=lengths),
        batch_size=rows,
        feature_to_max_seqlen={"a": 20, "b": 20},
        actual_batch_size=num_real,
        labels=labels,
        dense=torch.from_numpy(rng.normal(size=(rows, 2))).float(),
    )


def _click_step(
    model: ClickModel, name: str, cap: int | None, num_real: int = 12
) -> tuple[list[torch.Tensor], Any, int]:
    """Returns parameters after a step, its outputs back where samples were loaded, and micro-batches."""
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 100.0})
    optimizer = torch.optim.SGD(model.head.parameters(), lr=100.0)
    plan = construct_module_sharding_plan(
        model.tables, {name: row_wise(compute_kernel="fused") for name in ("a", "b")}, device_type="cpu"
    )
    sharded = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"tables": plan}))
    shuffler = ClickShuffler(max_tokens_per_micro_batch=cap)
    pipeline = pipeline_of(name, sharded, optimizer, shuffler)
    _, _, outputs = pipeline.progress(iter([_clicks(12, num_real)]))
    pipeline.reset()
    returned = shuffler.unshuffle(outputs, pipeline.plan)
    dense = [p.detach().clone() for p in model.head.parameters()]
    return [*_shards(sharded), *dense], returned, pipeline.report.num_micro_batches


def _shards(sharded: nn.Module) -> list[torch.Tensor]:
    """Returns copies of this rank's shards of the tables."""
    return [
        shard.tensor.clone()
        for value in sharded.state_dict().values()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    ]


def _compare_clicks(name: str) -> None:
    whole, logits, _ = _click_step(ClickModel(), name, None)
    divided, logits_of_divided, num_micro_batches = _click_step(ClickModel(), name, 30)
    assert num_micro_batches > 1
    start = [p.detach() for p in ClickModel().head.parameters()]
    assert (whole[-2] - start[0]).norm() > 1
    for one, other in zip(whole, divided, strict=True):
        assert (one - other).norm() <= 1e-5 * max(float(one.norm()), 1.0)
    torch.testing.assert_close(logits, logits_of_divided)

    num_real = 11 if dist.get_rank() else 12  # with padding, and in a single micro-batch
    _, logits, _ = _click_step(ClickModel(), name, None, num_real)
    _, logits_of_one, num_micro_batches = _click_step(ClickModel(), name, 10**6, num_real)
    assert num_micro_batches == 1
    torch.testing.assert_close(logits[:num_real], logits_of_one[:num_real])


@both_pipelines
def test_pooled_tables_of_a_custom_model_train_the_same_in_micro_batches(pools, name):
    pools(2).run(_compare_clicks, name)


class TablesAlone(nn.Module):
    """Nothing but tables, one of them under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = ClickModel().tables
        self.same = nn.ModuleDict({"tables": self.tables})

    def forward(self, batch: Clicks) -> tuple[torch.Tensor, None]:
        return self.tables(batch.features).values()[: batch.num_samples] ** 2, None


def _tables_alone(name: str, cap: int | None) -> tuple[list[torch.Tensor], int]:
    model = TablesAlone()
    # By the sharder: with an optimizer in the backward, torch 2.9 asks for a stream where there is no GPU.
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
    )
    plan = construct_module_sharding_plan(
        model.tables,
        {name: row_wise(compute_kernel="fused") for name in ("a", "b")},
        sharder=sharder,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    shuffler = BatchShufflerFactory.create("identity", max_tokens_per_micro_batch=cap)
    pipeline = pipeline_of(name, sharded, sharded.fused_optimizer, shuffler)
    pipeline.progress(iter([_clicks(12, 12 if dist.get_rank() else 1)]))
    pipeline.reset()
    return _shards(sharded), pipeline.report.num_micro_batches


def _compare_tables_alone(name: str) -> None:
    whole, _ = _tables_alone(name, None)
    divided, num_micro_batches = _tables_alone(name, 40)
    assert num_micro_batches > 1 and len(whole) >= 2
    for one, other in zip(whole, divided, strict=True):
        torch.testing.assert_close(one, other)


@both_pipelines
def test_a_model_of_tables_alone_trains_where_a_rank_has_fewer_samples(pools, name):
    pools(2).run(_compare_tables_alone, name)


def _hidden_features() -> str:
    return error_of(_click_step, RebuildingClickModel(), "none", 30)


def test_features_that_are_no_field_of_the_batch_are_named(pools):
    for message in pools(2).run(_hidden_features):
        assert message.startswith("RuntimeError: ")
        assert "is called with a KeyedJaggedTensor that is no field of the batch" in message


def _evaluated(cap: int | None) -> tuple[float, list[torch.Tensor]]:
    """Returns the loss sum of an evaluation step, and what it left in the gradients."""
    pipeline = ranking_pipeline("native", TokenShuffler(max_tokens_per_micro_batch=cap))
    pipeline._model.eval()
    with torch.no_grad():
        batch = draw_histories(np.random.default_rng(dist.get_rank()), 6)
        loss_sum, _, outputs = pipeline.progress(iter([batch]))
    pipeline.reset()
    assert cap is None or len(outputs) > 1
    dist.all_reduce(loss_sum)
    return float(loss_sum), [p.grad for p in pipeline._model.parameters() if p.grad is not None]


def test_evaluation_in_micro_batches_has_the_same_loss_and_no_gradients(pools):
    for (whole, _), (divided, gradients) in zip(
        pools(2).run(_evaluated, None), pools(2).run(_evaluated, CAP), strict=True
    ):
        assert divided == pytest.approx(whole, rel=1e-5) and not gradients


def test_a_model_alone_runs_in_micro_batches():
    model = ranking_model()
    batch = draw_histories(np.random.default_rng(1), 12)
    gradients = []
    for cap in (None, CAP):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        pipeline = pipeline_of("none", model, optimizer, TokenShuffler(max_tokens_per_micro_batch=cap))
        _, _, outputs = pipeline.progress(iter([batch]))
        assert cap is None or len(outputs) > 1
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, divided in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, divided)


def _custom_loop_and_pipeline() -> None:
    """Compares the dense parameters after two steps."""
    parameters = []
    for with_pipeline in (False, True):
        model, optimizer = sharded_ranking_model(0.5)
        shuffler = TokenShuffler(max_tokens_per_micro_batch=CAP)
        rng = np.random.default_rng(dist.get_rank())
        batches = [draw_histories(rng, 6) for _ in range(2)]
        if with_pipeline:
            assert len(list(steps_of(pipeline_of("none", model, optimizer, shuffler), batches))) == 2
        else:
            for batch, plan in shuffler.plan_ahead(batches):
                assert plan.num_micro_batches > 1
                optimizer.zero_grad()
                exchanged = shuffler.exchange(batch, plan)
                loss, _, _ = run_micro_batches(model, exchanged, shuffler, plan, "sum")
                loss.backward()
                optimizer.step()
        parameters.append([parameter.detach().clone() for parameter in model.module.dense.parameters()])
    assert all(map(torch.equal, *parameters))


def test_a_custom_loop_trains_as_the_pipeline_does(pools):
    pools(2).run(_custom_loop_and_pipeline)


class FailingOnce(nn.Module):
    """Raises in its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ranking_model()
        self.calls = 0

    def forward(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of memory")
        return self.model(batch)


@pytest.mark.parametrize("cap", [None, 10**6])
def test_a_step_that_raises_can_be_tried_again_with_its_own_plan(cap):
    model = FailingOnce()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipeline_of("none", model, optimizer, TokenShuffler(max_tokens_per_micro_batch=cap))
    rng = np.random.default_rng(3)
    batches = [draw_histories(rng, 6) for _ in range(3)]
    loader = iter(batches)
    tokens = [pipeline.progress(loader)[1]]
    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.progress(loader)
    tokens += [pipeline.progress(loader)[1] for _ in range(2)]
    assert tokens == [int(batch.num_loss_tokens().sum()) for batch in batches]
    assert len(set(tokens)) == 3
