"""Training with tables of unbounded ids, more than ten times as many as there are rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commons.datasets import (
    BenchmarkDatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    RandomDistribution,
    RandomSource,
    SequenceDataset,
)
from commons.distributed import BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, shard_model, train
from commons.training.checkpoints import on_host
from commons.unbounded_ids import ShardedUnboundedEmbeddingCollection
from hstu import batch_shuffler  # noqa: F401
from tests.commons.training.small_task import FLOPS, small_task
from tests.commons.training.test_trainer import CountedLabels
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, ranking_model

SHUFFLER = {"type": "hstu", "flops": FLOPS, "verify": True}
CPU = torch.device("cpu")


def _dataset(num_samples: int) -> SequenceDataset:
    ids = RandomDistribution("uniform", low=0, high=100 * VOCABULARY)
    args = BenchmarkDatasetArgs(
        feature_args=[
            FeatureArgs(["item", "action"], 12, is_jagged=True, value_dists={"item": ids}),
            FeatureArgs(["user"], 1, value_dists={"user": RandomDistribution("normal", mean=0, std=2e18)}),
            FeatureArgs(["tags"], 3, is_jagged=True),
        ],
        embedding_args=[
            DynamicEmbeddingArgs(["item"], "item_table", VOCABULARY),
            DynamicEmbeddingArgs(["user"], "user_table", VOCABULARY),
            EmbeddingArgs(["tags"], "tag_table", VOCABULARY, "model_parallel"),
            EmbeddingArgs(["action"], "action_table", NUM_CLASSES, "data_parallel"),
        ],
        item_feature_name="item",
        contextual_feature_names=["user", "tags"],
        action_feature_name="action",
    )
    return SequenceDataset(RandomSource(args, num_samples, 3), 4, dist.get_rank(), dist.get_world_size())


def _steps(
    eviction: str, pipeline_name: str, config: dict
) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Losses of a few steps, which row each id has after them, and the rows that a rank has ids in."""
    model, optimizer = shard_model(ranking_model(eviction=eviction), OptimizerArgs("sgd", 0.1), CPU)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=BatchShufflerFactory.create_from_config(config),
        loss_reduction="sum",
    )
    losses, batches = [], iter(_dataset(60))
    for _ in range(7):
        loss_sum, loss_tokens, _ = pipeline.progress(batches)
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / loss_tokens)
    pipeline.reset()
    state = [
        value.local_shards()[0].tensor
        for key, value in model.state_dict().items()
        if "_mch_" in key and "_table._mch" in key
    ]
    return losses, on_host(state), [len(held) for held in _held(model)]


def _held(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        module.held_ids(table)[0]
        for module in model.modules()
        if isinstance(module, ShardedUnboundedEmbeddingCollection)
        for table in ("item_table", "user_table")
        if module.has_table(table)
    ]


@pytest.mark.parametrize(
    ("eviction", "pipeline_name", "config"),
    [
        ("lru", "native", SHUFFLER),
        ("lfu", "none", {**SHUFFLER, "max_tokens_per_micro_batch": 30}),
        ("lfu", "native", {"type": "identity", "max_tokens_per_micro_batch": 30}),
    ],
)
def test_rows_and_losses_do_not_depend_on_where_a_sample_is_computed(pools, eviction, pipeline_name, config):
    plain = pools(2).run(_steps, eviction, "none", {"type": "identity"})
    other = pools(2).run(_steps, eviction, pipeline_name, config)
    for one, two in zip(plain, other, strict=True):
        assert one[0] == pytest.approx(two[0], rel=1e-5)
        assert len(one[1]) == 6
        assert all(torch.equal(before, after) for before, after in zip(one[1], two[1], strict=True))
        assert one[2][1] == VOCABULARY // 2 - 1  # items: all rows of ids in use, on both ranks
        assert one[2][0] > 15  # users


def _train(log_dir: str, num_steps: int, eviction: str, **settings) -> list[tuple[int, float]]:
    """Steps and losses of this process's run, of which rank 0 has a log."""
    task = small_task(
        ranking_model(hidden_dropout=0.3, eviction=eviction), _dataset(120), _dataset(13), CountedLabels()
    )
    args = TrainerArgs(
        train_batch_size=4,
        log_interval=1,
        log_dir=log_dir,
        max_train_iters=num_steps,
        enable_balanced_shuffler=True,
        **{"eval_interval": 5, **settings},
    )
    train(task, args, OptimizerArgs("adagrad", 0.05), CPU)
    if dist.get_rank():
        return []
    lines = [json.loads(line) for line in (Path(log_dir) / "train.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize(("eviction", "pipeline_type", "stop"), [("lru", "native", 7), ("lfu", "none", 8)])
def test_resumed_losses_are_those_of_a_run_that_never_stopped(pools, tmp_path, eviction, pipeline_type, stop):
    def losses(name: str, num_steps: int, **settings) -> list[tuple[int, float]]:
        run = partial(
            _train,
            str(tmp_path / name / "logs"),
            num_steps,
            eviction,
            ckpt_save_interval=2,
            ckpt_save_dir=str(tmp_path / name / "checkpoints"),
            pipeline_type=pipeline_type,
            **settings,
        )
        return pools(2).run(run)[0]

    assert pools(2).run(_num_distinct_items)[0] > 10 * VOCABULARY
    whole = losses("whole", 15, eval_interval=100)  # evaluating in between changes nothing either
    assert losses("stopped", stop) == whole[:stop]
    assert losses("stopped", 15) == whole


def _num_distinct_items() -> int:
    """Of all ranks, in the fifteen steps of an epoch."""
    own = torch.cat([batch.features["item"].values() for batch in _dataset(120)])
    of_ranks: list[torch.Tensor] = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return len(torch.cat(of_ranks).unique())


def _pipelines(has_cacheable_tables: bool) -> list[str]:
    task = TrainingTask(None, None, None, None, None, "hstu", {}, has_cacheable_tables=has_cacheable_tables)
    args = TrainerArgs(train_batch_size=1, pipeline_type="prefetch")
    return [task.pipeline_name(args, torch.device(device)) for device in ("cpu", "cuda")]


def test_a_model_without_tables_to_cache_is_not_prefetched(pools):
    assert pools(2).run(_pipelines, True)[0] == ["native", "prefetch"]
    assert pools(2).run(_pipelines, False)[0] == ["native", "native"]
