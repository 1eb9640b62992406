"""Compares what training steps learn with and without a shuffler, on real ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardedModule

from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.commons.extensions.pieces.drawn_cuts import GivenCuts
from tests.process_pool import rank_device

# So large that the rounding of a parameter does not show in its change.
LEARNING_RATE = 1e4

# Of a step: what it subtracts from this rank's parameters by name; the loss and loss tokens of all ranks.
Run = tuple[dict[str, torch.Tensor], float, float]


def sharded(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """Shards a model; returns its optimizer, too. Collective over all ranks."""
    return shard_model(model, OptimizerArgs("sgd", LEARNING_RATE), rank_device())


def step(
    model: torch.nn.Module, optimizer: Any, pipeline_name: str, shuffler: BatchShuffler, batch: BaseBatch
) -> Run:
    """Runs a step of a sharded model on this rank's batch, and takes it back. Collective over all ranks."""
    device = rank_device()
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    tensors = local_tensors(model)
    start = {name: tensor.double().clone() for name, tensor in tensors.items()}
    pipeline.progress(iter([batch]))
    if pipeline_name == "native":
        tables = [module for module in model.modules() if isinstance(module, ShardedModule)]
        assert len(pipeline._pipelined_modules) == len(tables)
    is_placed_by_hand = any(isinstance(extension, GivenCuts) for extension in shuffler.extensions)
    if shuffler.exchanges and not is_placed_by_hand:
        assert pipeline.report.imbalance_after < pipeline.report.imbalance_before
        assert pipeline.report.samples_moved > 0
    loss = pipeline.loss_sum.to(device)
    dist.all_reduce(loss)
    changes = {name: start[name] - tensor.double() for name, tensor in tensors.items()}
    pipeline.detach()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(start[name])
    return changes, float(loss), pipeline.loss_tokens


def check_equal(plain: Run, other: Run, has_loss: bool) -> None:
    """Checks that gradients agree within a relative L2 error of 1e-5, and are zero only without a loss."""
    squares = {
        name: (float(value.square().sum()), float((value - other[0][name]).square().sum()))
        for name, value in plain[0].items()
    }
    of_ranks: list[dict[str, tuple[float, float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, squares)
    for name in {name for of_rank in of_ranks for name in of_rank}:
        found = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        squared, difference = map(sum, zip(*found, strict=True))
        assert (squared > 0) == has_loss, name
        assert difference <= 1e-10 * squared, (name, (difference / max(squared, 1e-300)) ** 0.5)
    assert plain[1] == pytest.approx(other[1], rel=1e-5)


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns this rank's parameters and buffers by name, with its shards of tables."""
    local = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else [value]
        for shard in shards:
            local[name] = (shard.tensor if hasattr(shard, "tensor") else shard).detach()
    return local
