"""Compares what training steps learn with and without a shuffler, on real ranks."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.commons.extensions.pieces.drawn_cuts import GivenCuts
from tests.process_pool import rank_device

# So large that the rounding of a parameter does not show in its change.
LEARNING_RATE = 1e4

Changes = dict[str, torch.Tensor]  # what a step subtracts from the parameters on this rank, by name
Run = tuple[Changes, float, float]  # of a step; the loss and the loss tokens of all ranks
# Squared norms of each gradient and of its difference; both losses.
Comparison = tuple[dict[str, tuple[float, float]], tuple[float, float]]


def step(model: torch.nn.Module, pipeline_name: str, shuffler: BatchShuffler, batch: BaseBatch) -> Run:
    """Runs a step on this rank's batch. Collective over all ranks."""
    device = rank_device()
    sharded, optimizer = shard_model(model, OptimizerArgs("sgd", LEARNING_RATE), device)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=sharded,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    tensors = _local_tensors(sharded)
    start = {name: tensor.double().clone() for name, tensor in tensors.items()}
    pipeline.progress(iter([batch]))
    is_placed_by_hand = any(isinstance(extension, GivenCuts) for extension in shuffler.extensions)
    if shuffler.exchanges and not is_placed_by_hand:
        assert pipeline.report.imbalance_after < pipeline.report.imbalance_before
        assert pipeline.report.samples_moved > 0
    loss = pipeline.loss_sum.to(device)
    dist.all_reduce(loss)
    changes = {name: start[name] - tensor.double() for name, tensor in tensors.items()}
    return changes, float(loss), pipeline.loss_tokens


def comparison(plain: Run, other: Run) -> Comparison:
    """Compares two steps on one rank."""
    norms = {
        name: (float(value.square().sum()), float((value - other[0][name]).square().sum()))
        for name, value in plain[0].items()
    }
    return norms, (plain[1], other[1])


def check_equal(results: Sequence[Comparison], has_loss: bool) -> None:
    """Checks that gradients agree within a relative L2 error of 1e-5, and that none is zero given a loss.

    Args:
        results: comparison of each rank.
        has_loss: whether there is a loss; without, all gradients are zero.
    """
    for name in {name for norms, _ in results for name in norms}:
        squared = sum(norms[name][0] for norms, _ in results if name in norms)
        difference = sum(norms[name][1] for norms, _ in results if name in norms)
        assert (squared > 0) == has_loss, name
        assert difference <= 1e-10 * squared, (name, (difference / max(squared, 1e-300)) ** 0.5)
    for _, (plain_loss, other_loss) in results:
        assert plain_loss == pytest.approx(other_loss, rel=1e-5)


def dense_differences(changes: Changes, model: torch.nn.Module) -> dict[str, float]:
    """Returns relative L2 differences of dense parameters' changes from the gradients of `model`."""
    gradients = {name: parameter.grad.double() for name, parameter in model.dense.named_parameters()}
    differences = {}
    for name, change in changes.items():
        if "dense." in name:
            gradient = gradients[name.partition("dense.")[2]]
            difference = change.cpu() / LEARNING_RATE - gradient
            differences[name] = float(difference.norm() / gradient.norm())
    return differences


def _local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    local = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else [value]
        for shard in shards:
            local[name] = (shard.tensor if hasattr(shard, "tensor") else shard).detach()
    return local
