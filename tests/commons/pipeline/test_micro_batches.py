"""Steps in micro-batches: what they compute, look up, reduce and keep in memory."""

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

from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.perf_model import HSTUFlops
from commons.pipeline import TrainPipelineFactory, run_micro_batches
from commons.pipeline.train_pipelines import SequentialTrainPipeline
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from hstu import batch_shuffler  # noqa: F401
from tests.commons.pipeline.test_whole_epochs import _batch, _contents
from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model

CPU = torch.device("cpu")
FLOPS = HSTUFlops(2, 16, 2, 4)
CAP = 24


def _pipeline(pipeline_name: str, shuffler: BatchShuffler) -> Any:
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), CPU)
    return TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )


def _shuffler(config: dict[str, Any], groups: list[list[int]] | None) -> BatchShuffler:
    group = None
    for ranks in groups or []:
        made = dist.new_group(ranks)
        group = made if dist.get_rank() in ranks else group
    of_model = {} if config["type"] == "identity" else {"flops": FLOPS, "process_group": group}
    return BatchShufflerFactory.create_from_config({"max_tokens_per_micro_batch": CAP, **config, **of_model})


@dataclass
class Ran:
    """What a rank loaded in all, and of each step what its micro-batches held."""

    loaded: list[tuple]
    steps: list[list[list[tuple]]]


def _run(pipeline_name: str, config: dict[str, Any], num_batches: tuple[int, ...], groups: Any) -> Ran:
    shuffler = _shuffler(config, groups)
    pipeline = _pipeline(pipeline_name, shuffler)
    computed: list[list[tuple]] = []
    dense = pipeline._model.module.dense
    dense.register_forward_pre_hook(lambda module, args: computed.append(_contents(args[1])))
    rng = np.random.default_rng((7, dist.get_rank()))
    batches = [_batch(rng, 6) for _ in range(num_batches[dist.get_rank()])]
    ran = Ran([content for batch in batches for content in _contents(batch)], [])
    loader = iter(batches)
    while True:
        try:
            loss_sum, _, outputs = pipeline.progress(loader)
        except StopIteration:
            return ran
        assert len(outputs) == len(computed) == pipeline.plan.num_micro_batches
        assert bool(loss_sum.isfinite())
        ran.steps.append(list(computed))
        computed.clear()


def _num_tokens(sample: tuple) -> int:
    user, items, actions, _ = sample  # tags are empty
    return len(user) + len(items) + len(actions)


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize(
    ("config", "num_batches", "groups"),
    [
        ({"type": "hstu"}, (4, 4), None),
        ({"type": "hstu", "equal_rows": False, "partitioner": "rebalance"}, (5, 2), None),
        ({"type": "hstu", "window": 2}, (4, 3), None),
        ({"type": "identity"}, (4, 2), None),
        ({"type": "hstu"}, (4, 1, 3, 4), [[0, 1], [2, 3]]),
        ({"type": "hstu", "window": 2}, (2, 4, 3), [[0, 2], [1]]),
    ],
    ids=["even", "uneven", "window", "identity", "groups", "window, one alone"],
)
def test_every_sample_is_in_one_micro_batch_of_as_many_on_every_rank(
    pools, pipeline_name, config, num_batches, groups
):
    results = pools(len(num_batches)).run(_run, pipeline_name, config, num_batches, groups)
    loaded = Counter(sample for ran in results for sample in ran.loaded)
    computed = Counter(
        sample for ran in results for step in ran.steps for of_one in step for sample in of_one
    )
    assert loaded == computed
    counts = [[len(step) for step in ran.steps] for ran in results]
    assert all(of_rank == counts[0] for of_rank in counts) and len(counts[0]) == max(num_batches)
    assert max(counts[0]) > 2
    for ran in results:
        for of_one in (of_one for step in ran.steps for of_one in step):
            assert len(of_one) == 1 or sum(map(_num_tokens, of_one)) <= CAP


def _lookups_and_reductions(pipeline_name: str, cap: int | None) -> tuple[int, int, int]:
    """Of three steps behind the first two: calls of a table, gradient buckets reduced, micro-batches."""
    pipeline = _pipeline(pipeline_name, _shuffler({"type": "hstu", "max_tokens_per_micro_batch": cap}, None))
    (replicated,) = (m for m in pipeline._model.modules() if isinstance(m, DistributedDataParallel))
    reduced = []

    def counting_hook(group, bucket):
        reduced.append(bucket.index())
        return allreduce_hook(group, bucket)

    replicated.register_comm_hook(None, counting_hook)
    rng = np.random.default_rng(dist.get_rank())
    loader = iter([_batch(rng, 6) for _ in range(5)])
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
    return lookups.call_count, len(reduced), micro_batches


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_tables_are_looked_up_and_gradients_reduced_as_often_as_without(pools, pipeline_name):
    whole = pools(2).run(_lookups_and_reductions, pipeline_name, None)
    divided = pools(2).run(_lookups_and_reductions, pipeline_name, CAP)
    for (lookups, reductions, once), (lookups_divided, reductions_divided, several) in zip(
        whole, divided, strict=True
    ):
        assert (lookups_divided, reductions_divided) == (lookups, reductions)
        assert lookups > 0 and reductions > 0 and once == 3 and several > 6


class _Kept:
    """A tensor kept for the backward pass, and in the count as long as it is."""

    def __init__(self, tensor: torch.Tensor, count: _CountKept) -> None:
        self.tensor = tensor
        self._count = count
        self._key = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        count.change(self._key, 1)

    def __del__(self) -> None:
        self._count.change(self._key, -1)


class _CountKept:
    """The most bytes that were kept for backward passes at one time, each memory once."""

    def __init__(self) -> None:
        self._users: Counter[tuple[int, int]] = Counter()
        self._bytes = self.peak = 0

    def change(self, key: tuple[int, int], users: int) -> None:
        before = self._users[key]
        self._users[key] += users
        if 0 in (before, self._users[key]):
            self._bytes += users * key[1]
        self.peak = max(self.peak, self._bytes)


def _kept_for_backward(pipeline_name: str, rows: int, cap: int | None) -> int:
    """Bytes of activations at the peak of a training step of `rows` equal samples of 21 tokens."""
    pipeline = _pipeline(pipeline_name, _shuffler({"type": "hstu", "max_tokens_per_micro_batch": cap}, None))
    items = [1, 2, 3, 4] * 2 + [5, 6]
    batch = hstu_batch([Sample([1], [], items, items[::-1], 0, [0] * 10)] * rows)
    kept = _CountKept()
    forward = pipeline._stage.forward

    def watched(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Kept(tensor, kept), lambda kept: kept.tensor
        ):
            return forward(model, batch)

    pipeline._stage.forward = watched
    pipeline.progress(iter([batch]))
    return kept.peak


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_activations_grow_with_the_cap_and_not_with_the_batch(pools, pipeline_name):
    def peak(rows: int, cap: int | None) -> int:
        return max(pools(2).run(_kept_for_backward, pipeline_name, rows, cap))

    per_sample = (peak(64, None) - peak(16, None)) / 48
    # What grows are the ids of the lookups.
    assert peak(64, 2 * 21) - peak(16, 2 * 21) <= 0.03 * 48 * per_sample
    assert peak(64, 8 * 21) - peak(64, 2 * 21) == pytest.approx(6 * per_sample, rel=0.05)


@dataclass
class Clicks(BaseBatch):
    """Pooled features, a dense one, and a label."""

    dense: torch.Tensor | None = None


class ClickShuffler(BatchShuffler):
    """By ids."""

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
    """Hides the features from what would look them up once."""

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
    model: ClickModel, pipeline_name: str, cap: int | None, num_real: int = 12
) -> tuple[list[torch.Tensor], Any, int]:
    """Parameters after a step, the outputs brought back to where their samples were loaded, micro-batches."""
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 100.0})
    optimizer = torch.optim.SGD(model.head.parameters(), lr=100.0)
    plan = construct_module_sharding_plan(
        model.tables, {name: row_wise(compute_kernel="fused") for name in ("a", "b")}, device_type="cpu"
    )
    sharded = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"tables": plan}))
    shuffler = ClickShuffler(max_tokens_per_micro_batch=cap)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=sharded,
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    _, _, outputs = pipeline.progress(iter([_clicks(12, num_real)]))
    returned = shuffler.unshuffle(outputs, pipeline.plan)
    shards = [
        shard.tensor.clone()
        for value in sharded.state_dict().values()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    ]
    dense = [p.detach().clone() for p in model.head.parameters()]
    return [*shards, *dense], returned, pipeline.report.num_micro_batches


def _pooled(pipeline_name: str) -> None:
    whole, logits, _ = _click_step(ClickModel(), pipeline_name, None)
    divided, logits_of_divided, num_micro_batches = _click_step(ClickModel(), pipeline_name, 30)
    assert num_micro_batches > 1
    start = [p.detach() for p in ClickModel().head.parameters()]
    assert (whole[-2] - start[0]).norm() > 1
    for one, other in zip(whole, divided, strict=True):
        assert (one - other).norm() <= 1e-5 * max(float(one.norm()), 1.0)
    torch.testing.assert_close(logits, logits_of_divided)


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_pooled_tables_of_ones_own_model_train_the_same_in_micro_batches(pools, pipeline_name):
    pools(2).run(_pooled, pipeline_name)


def _one_of_all(pipeline_name: str) -> None:
    num_real = 11 if dist.get_rank() else 12
    _, logits, _ = _click_step(ClickModel(), pipeline_name, None, num_real)
    _, of_one, num_micro_batches = _click_step(ClickModel(), pipeline_name, 10**6, num_real)
    assert num_micro_batches == 1
    torch.testing.assert_close(logits[:num_real], of_one[:num_real])


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_outputs_of_a_single_micro_batch_come_back_where_ranks_have_padding(pools, pipeline_name):
    pools(2).run(_one_of_all, pipeline_name)


class TablesAlone(nn.Module):
    """Nothing but tables, one of them under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = ClickModel().tables
        self.same = nn.ModuleDict({"tables": self.tables})

    def forward(self, batch: Clicks) -> tuple[torch.Tensor, None]:
        return self.tables(batch.features).values()[: batch.num_samples] ** 2, None


def _tables_alone(pipeline_name: str, cap: int | None) -> tuple[list[torch.Tensor], int]:
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
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=sharded,
        optimizer=sharded.fused_optimizer,
        device=CPU,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    pipeline.progress(iter([_clicks(12, 12 if dist.get_rank() else 1)]))
    shards = [
        shard.tensor.clone()
        for value in sharded.state_dict().values()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    ]
    return shards, pipeline.report.num_micro_batches


def _compare_tables_alone(pipeline_name: str) -> None:
    whole, _ = _tables_alone(pipeline_name, None)
    divided, num_micro_batches = _tables_alone(pipeline_name, 40)
    assert num_micro_batches > 1 and len(whole) >= 2
    for one, other in zip(whole, divided, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_a_model_of_tables_alone_trains_where_a_rank_has_fewer_samples(pools, pipeline_name):
    pools(2).run(_compare_tables_alone, pipeline_name)


def _hidden_features() -> str:
    with pytest.raises(RuntimeError) as error:
        _click_step(RebuildingClickModel(), "none", 30)
    return str(error.value)


def test_features_that_are_no_field_of_the_batch_are_named(pools):
    for message in pools(2).run(_hidden_features):
        assert "is called with a KeyedJaggedTensor that is no field of the batch" in message


def _evaluated(cap: int | None) -> tuple[float, list[torch.Tensor]]:
    """Loss sum of an evaluation step, and what it left in the gradients."""
    pipeline = _pipeline("native", _shuffler({"type": "hstu", "max_tokens_per_micro_batch": cap}, None))
    pipeline._model.eval()
    with torch.no_grad():
        loss_sum, _, outputs = pipeline.progress(iter([_batch(np.random.default_rng(dist.get_rank()), 6)]))
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
    batch = _batch(np.random.default_rng(1), 12)
    gradients = []
    for cap in (None, CAP):
        shuffler = BatchShufflerFactory.create("hstu", flops=FLOPS, max_tokens_per_micro_batch=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _, _, outputs = SequentialTrainPipeline(model, optimizer, CPU, shuffler, "sum").progress(
            iter([batch])
        )
        assert cap is None or len(outputs) > 1
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, divided in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, divided)


def _own_loop(with_pipeline: bool) -> list[torch.Tensor]:
    """Dense parameters after two steps."""
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.5), CPU)
    shuffler = _shuffler({"type": "hstu"}, None)
    rng = np.random.default_rng(dist.get_rank())
    loader = iter([_batch(rng, 6) for _ in range(2)])
    if with_pipeline:
        pipeline = SequentialTrainPipeline(model, optimizer, CPU, shuffler, "sum")
        for _ in range(2):
            pipeline.progress(loader)
        pipeline.reset()
    else:
        for batch, plan in shuffler.plan_ahead(loader):
            batch = shuffler.exchange(batch, plan)
            assert plan.num_micro_batches > 1
            optimizer.zero_grad()
            loss, _, _ = run_micro_batches(model, batch, shuffler, plan, "sum")
            loss.backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.module.dense.parameters()]


def test_a_loop_of_ones_own_trains_as_the_pipeline(pools):
    own, pipelined = (pools(2).run(_own_loop, with_pipeline) for with_pipeline in (False, True))
    for of_own, of_pipeline in zip(own[0], pipelined[0], strict=True):
        assert torch.equal(of_own, of_pipeline)


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
    shuffler = BatchShufflerFactory.create("hstu", flops=FLOPS, max_tokens_per_micro_batch=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = SequentialTrainPipeline(model, optimizer, CPU, shuffler, "sum")
    rng = np.random.default_rng(3)
    batches = [_batch(rng, 6) for _ in range(3)]
    loader = iter(batches)
    tokens = [pipeline.progress(loader)[1]]
    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.progress(loader)
    tokens += [pipeline.progress(loader)[1] for _ in range(2)]
    assert tokens == [int(batch.num_loss_tokens().sum()) for batch in batches]
    assert len(set(tokens)) == 3
