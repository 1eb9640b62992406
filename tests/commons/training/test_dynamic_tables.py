"""Training with tables of unbounded ids, more than ten times as many as there are rows."""

from __future__ import annotations

from functools import partial

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
from commons.training import OptimizerArgs, shard_model, train
from commons.training.checkpoints import host_copy
from commons.unbounded_ids import ShardedUnboundedEmbeddingCollection
from tests.commons.training.small_task import CPU, FLOPS, args_of, losses_in, small_task
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, ranking_model

SHUFFLER = {"type": "hstu", "flops": FLOPS, "verify": True}


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
    return losses, host_copy(state), [len(held) for held in _held(model)]


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


def _train(folder: str, num_steps: int, eviction: str, **settings) -> list[tuple[int, float]]:
    """Steps and losses of all runs in a folder, on rank 0."""
    task = small_task(ranking_model(hidden_dropout=0.3, eviction=eviction), _dataset(120), _dataset(13))
    args = args_of(
        f"{folder}/logs",
        max_train_iters=num_steps,
        enable_balanced_shuffler=True,
        ckpt_save_interval=2,
        ckpt_save_dir=f"{folder}/checkpoints",
        **{"eval_interval": 5, **settings},
    )
    train(task, args, OptimizerArgs("adagrad", 0.05), CPU)
    return losses_in(args.log_dir)


@pytest.mark.parametrize(("eviction", "pipeline_type", "stop"), [("lru", "native", 7), ("lfu", "none", 8)])
def test_resumed_losses_are_those_of_a_run_that_never_stopped(pools, tmp_path, eviction, pipeline_type, stop):
    def losses(name: str, num_steps: int, **settings) -> list[tuple[int, float]]:
        folder = str(tmp_path / name)
        run = partial(_train, folder, num_steps, eviction, pipeline_type=pipeline_type, **settings)
        return pools(2).run(run)[0]

    assert pools(2).run(_num_distinct_items)[0] > 10 * VOCABULARY
    whole = losses("whole", 15, eval_interval=100)  # evaluating in between changes nothing either
    assert losses("stopped", stop) == whole[:stop]
    assert losses("stopped", 15) == whole


def _num_distinct_items() -> int:
    """Distinct items of all ranks in the fifteen steps of an epoch."""
    own = torch.cat([batch.features["item"].values() for batch in _dataset(120)])
    of_ranks: list[torch.Tensor] = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return len(torch.cat(of_ranks).unique())
