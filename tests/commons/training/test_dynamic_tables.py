"""Training with tables of unbounded ids, which test_recovery.py resumes, too."""

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory, Extension
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.verification import Verification
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from commons.unbounded_ids import ShardedUnboundedEmbeddingCollection
from tests.commons.training.internals import HostCopies
from tests.commons.training.small_task import CPU, FLOPS, small_dataset
from tests.hstu.hstu_samples import VOCABULARY, ranking_model

SHUFFLER = {"type": "hstu", "flops": FLOPS}


def _steps(
    eviction: str, pipeline_name: str, config: dict, *extensions: Extension
) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Losses of a few steps, which row each id has after them, and the rows that a rank has ids in."""
    model, optimizer = shard_model(ranking_model(eviction=eviction), OptimizerArgs("sgd", 0.1), CPU)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=BatchShufflerFactory.create_from_config({**config, "extensions": extensions}),
        loss_reduction="sum",
    )
    losses, batches = [], iter(small_dataset(60, unbounded_ids=True))
    for _ in range(7):
        pipeline.progress(batches)
        dist.all_reduce(pipeline.loss_sum)
        losses.append(float(pipeline.loss_sum) / pipeline.loss_tokens)
    pipeline.reset()
    state = [
        value.local_shards()[0].tensor
        for key, value in model.state_dict().items()
        if "_mch_" in key and "_table._mch" in key
    ]
    return losses, HostCopies().copy(state), [len(held) for held in _held(model)]


def _held(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        module.held_ids(table)[0]
        for module in model.modules()
        if isinstance(module, ShardedUnboundedEmbeddingCollection)
        for table in ("item_table", "user_table")
        if module.has_table(table)
    ]


@pytest.mark.parametrize(
    ("eviction", "pipeline_name", "config", "extensions"),
    [
        ("lru", "native", SHUFFLER, [Verification()]),
        ("lfu", "none", SHUFFLER, [Verification(), MicroBatches(30)]),
    ],
)
def test_rows_and_losses_do_not_depend_on_where_a_sample_is_computed(
    pools, eviction, pipeline_name, config, extensions
):
    plain = pools(2).run(_steps, eviction, "none", {"type": "identity"})
    other = pools(2).run(_steps, eviction, pipeline_name, config, *extensions)
    for one, two in zip(plain, other, strict=True):
        assert one[0] == pytest.approx(two[0], rel=1e-5)
        assert len(one[1]) == 6
        assert all(torch.equal(before, after) for before, after in zip(one[1], two[1], strict=True))
        assert one[2][1] == VOCABULARY // 2 - 1  # items: all rows of ids in use, on both ranks
        assert one[2][0] > 15  # users
