"""What one training step learns with and without a shuffler, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model

# So large that rounding of the parameter does not show in the difference that a step makes to it.
LEARNING_RATE = 1e4

# Per parameter, squared norms of the gradient and of its difference; and both losses.
Comparison = tuple[dict[str, tuple[float, float]], tuple[float, float]]


def step(
    model: torch.nn.Module, pipeline_name: str, shuffler: BatchShuffler, batch: BaseBatch
) -> tuple[dict[str, torch.Tensor], float]:
    """What one step takes off each parameter that this rank holds, and the step's global loss."""
    device = torch.device("cpu")
    sharded, optimizer = shard_model(model, OptimizerArgs("sgd", LEARNING_RATE), device)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=sharded,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    before = _parameters(sharded)
    loss_sum, loss_tokens, _ = pipeline.progress(iter([batch]))
    dist.all_reduce(loss_sum)
    if shuffler.group.num_ranks > 1:
        assert pipeline.report.imbalance_after < pipeline.report.imbalance_before
        assert pipeline.report.samples_moved > 0
    after = _parameters(sharded)
    return {name: before[name] - after[name] for name in before}, float(loss_sum) / max(loss_tokens, 1)


def dense_differences(steps: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, float]:
    """Relative L2 differences of what `step` took off dense parameters from the gradients of `model`."""
    gradients = {name: parameter.grad.double() for name, parameter in model.dense.named_parameters()}
    return {
        name: float((step / LEARNING_RATE - gradients[name.partition("dense.")[2]]).norm())
        / float(gradients[name.partition("dense.")[2]].norm())
        for name, step in steps.items()
        if "dense." in name
    }


def compare(
    make_model: Callable[[], torch.nn.Module],
    pipeline_name: str,
    shuffler_config: dict[str, Any],
    batch: BaseBatch,
) -> Comparison:
    """One rank's part of a step without and with the shuffler. Collective over all ranks."""
    plain, plain_loss = step(make_model(), pipeline_name, BatchShufflerFactory.create("identity"), batch)
    shuffler = BatchShufflerFactory.create_from_config(shuffler_config)
    shuffled, shuffled_loss = step(make_model(), pipeline_name, shuffler, batch)
    norms = {
        name: (float(plain[name].square().sum()), float((plain[name] - shuffled[name]).square().sum()))
        for name in plain
    }
    return norms, (plain_loss, shuffled_loss)


def window_gradients(
    model: torch.nn.Module, pipeline_name: str, shuffler: BatchShuffler, batches: Sequence[BaseBatch]
) -> tuple[dict[str, torch.Tensor], float, list[int]]:
    """What the steps together take off each parameter, each beginning at the same parameters.

    Returns:
        That, each step's part weighted by its own loss tokens if the shuffler plans no windows, because such
        a step is normalised by its own; the loss sum of all steps and ranks; and the steps' loss tokens.
    """
    device = torch.device("cpu")
    sharded, optimizer = shard_model(model, OptimizerArgs("sgd", LEARNING_RATE), device)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=sharded,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    loader = iter(batches)
    start = _parameters(sharded)
    taken = {name: torch.zeros_like(value) for name, value in start.items()}
    total, tokens = torch.zeros(()), []
    for _ in batches:
        loss_sum, loss_tokens, _ = pipeline.progress(loader)
        total += loss_sum
        tokens.append(loss_tokens)
        for name, value in _parameters(sharded).items():
            taken[name] += (start[name] - value) * (1 if shuffler.settings.window > 1 else loss_tokens)
        _set_parameters(sharded, start)
    if shuffler.settings.window == 1:
        taken = {name: value * len(tokens) / sum(tokens) for name, value in taken.items()}
    dist.all_reduce(total)
    return taken, float(total), tokens


def check_equal(results: list[Comparison], has_loss: bool) -> None:
    """Gradients of every parameter within a relative L2 error of 1e-5; none is zero if there is a loss."""
    for name in {name for norms, _ in results for name in norms}:
        squared = sum(norms[name][0] for norms, _ in results if name in norms)
        difference = sum(norms[name][1] for norms, _ in results if name in norms)
        assert (squared > 0) == has_loss, name
        assert difference <= 1e-10 * squared, (name, (difference / max(squared, 1e-300)) ** 0.5)
    for _, (plain_loss, shuffled_loss) in results:
        assert plain_loss == pytest.approx(shuffled_loss, rel=1e-5)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.double().clone() for name, tensor in _local_tensors(model).items()}


def _set_parameters(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in _local_tensors(model).items():
        tensor.copy_(values[name])


def _local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    local = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else [value]
        for shard in shards:
            tensor = shard.tensor if hasattr(shard, "tensor") else shard
            local[name] = tensor.detach()
    return local
