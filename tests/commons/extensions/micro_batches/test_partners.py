"""Parts of torch and TorchRec with micro-batches: they train as without, or are refused."""

from collections.abc import Iterable
from importlib.util import find_spec
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.commons.extensions.micro_batches.divided import in_micro_batches
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    RankingModel,
    pipeline_of,
    sharded,
    sharded_ranking_model,
    steps_of,
)
from tests.commons.pipeline.runs import Costs
from tests.on_ranks import on_ranks

CAP = 10  # tokens


class Squares(nn.Module):
    """May use its weights from a list, where DistributedDataParallel does not see them change."""

    def __init__(self, anew: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self._anew, self._weights = anew, [self.linear.weight, self.linear.bias]

    def forward(self, batch):
        weight, bias = [self.linear.weight, self.linear.bias] if self._anew else self._weights
        return nn.functional.linear(batch["x"], weight, bias).squeeze(1) ** 2, None


def loaded_rows(rank: int) -> dict[str, torch.Tensor]:
    """Returns four rows of a rank, which need two micro-batches."""
    costs = torch.tensor([[9, 2, 3, 4], [9, 1, 1, 5]])
    return {"cost": costs[rank], "x": torch.arange(12.0).view(4, 3) / 7 + rank}


def drawn(steps: int) -> list[Any]:
    rng = np.random.default_rng(dist.get_rank())
    return [histories(rng.integers(1, 9, 3), rng) for _ in range(steps)]


def losses_of(pipeline: Any, batches: Iterable[Any]) -> list[float]:
    """Returns the loss of each step over all ranks."""
    losses = []
    for loss_sum, tokens, _ in steps_of(pipeline, batches):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / tokens)
    return losses


def of_histories(name: str, made: tuple[Any, Any], cap: int | None, **more: Any) -> Any:
    return pipeline_of(name, *made, TokenShuffler(extensions=in_micro_batches(cap)), **more)


def learned_from_rows(model: nn.Module, cap: int | None, optimizer: Any = None) -> list[torch.Tensor]:
    """Returns the parameters after three steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline = pipeline_of("none", model, optimizer, Costs(extensions=in_micro_batches(cap)))
    assert len([*steps_of(pipeline, [loaded_rows(dist.get_rank())] * 3)]) == 3
    return [*model.parameters()]


def stepping_in_backward(cap: int | None) -> None:
    """A fully sharded model's optimizers step as soon as a gradient is there."""
    model = Squares()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    before = model.linear.weight.full_tensor().clone()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    learned_from_rows(model, cap, torch.optim.SGD(model.parameters(), lr=0.0))
    assert not torch.equal(model.linear.weight.full_tensor(), before)


def injected_backward(cap: int | None) -> None:
    """TorchRec injects work into the backward of a sharded table, once a step."""
    from torchrec.distributed.train_pipeline import backward_injection

    pipeline, calls = of_histories("native", sharded_ranking_model(0.1), cap), []
    finder = backward_injection.OutputDistTensorFinder(sharding_type=ShardingType.ROW_WISE)
    activation = backward_injection.InjectionTargetType.ACTIVATION
    site = backward_injection.InjectionSite(fqn="tables", tensor_finder=finder, target_type=activation)
    pipeline.register_backward_hook(site, calls.append)
    assert len(losses_of(pipeline, drawn(3))) == len(calls) == 3


class Checkpointed(RankingModel):
    """Computes its forward again in the backward, lookups included."""

    def forward(self, batch):
        return checkpoint(super().forward, batch, use_reentrant=False)


def checkpointed_lookups(cap: int | None) -> None:
    losses = losses_of(of_histories("none", sharded(Checkpointed(), 0.1), cap), drawn(3))
    expected = losses_of(of_histories("none", sharded_ranking_model(0.1), None), drawn(3))
    assert losses == pytest.approx(expected, rel=1e-5)


def features_freed_early(cap: int | None) -> None:
    """TorchRec frees the features' memory after their lookup, in which jagged labels must not lie."""
    freeing = of_histories("native", sharded_ranking_model(0.1), cap, free_features_storage_early=True)
    losses = losses_of(freeing, drawn(3))
    assert losses == losses_of(of_histories("native", sharded_ranking_model(0.1), None), drawn(3))


class Renumbered(nn.Module):
    """Changes ids before they are looked up, for TorchRec to pipeline by `pipeline_postproc`."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(features.keys(), features.values() // 2, lengths=features.lengths())


class WithPostproc(RankingModel):
    def __init__(self) -> None:
        super().__init__()
        self.renumbered = Renumbered()

    def forward(self, batch):
        return self.dense(self.tables(self.renumbered(batch.features)), batch)


def whole_batches_changed(cap: int | None) -> None:
    pipeline = of_histories("native", sharded(WithPostproc()), cap, pipeline_postproc=True)
    assert len(losses_of(pipeline, drawn(2))) == 2


def flat_parameters(cap: int | None, keeps_names: bool = False) -> list[torch.Tensor]:
    model = FullyShardedDataParallel(Squares(), use_orig_params=keeps_names, device_id=CPU)
    return learned_from_rows(model, cap)


def named_parameters(cap: int | None) -> list[torch.Tensor]:
    return flat_parameters(cap, keeps_names=True)


def static_graph_of_a_list(cap: int | None) -> None:
    learned_from_rows(DistributedDataParallel(Squares(anew=False), static_graph=True), cap)


def gradient_accumulation_of_torchrec(cap: int | None) -> list[torch.Tensor]:
    from torchrec.distributed.train_pipeline import gradient_accumulation

    model = DistributedDataParallel(Squares())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline = pipeline_of("none", model, optimizer, Costs(extensions=in_micro_batches(cap)))
    config = gradient_accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=2)
    accumulating = gradient_accumulation.GradientAccumulationWrapper(pipeline, optimizer, model, config)
    loader = iter([loaded_rows(dist.get_rank())] * 4)
    for _ in range(4):
        accumulating.progress(loader)
    with pytest.raises(StopIteration):
        accumulating.progress(loader)
    return [*model.parameters()]


def since(is_there: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there, reason="this version of TorchRec does not have it")


ACCUMULATION = since(find_spec("torchrec.distributed.train_pipeline.gradient_accumulation") is not None)
# TorchRec 1.7 has both that and the tensor finders of its injected backward.
FREEING = since("free_features_storage_early" in signature(TrainPipelineSparseDist).parameters)
# Each runs without micro-batches; with them it is refused with these words, or, with "", learns the same.
PARTNERS: list[Any] = [
    (stepping_in_backward, ValueError, "linear.weight has a hook on its gradient"),
    pytest.param(injected_backward, RuntimeError, "Unsupported awaitable type", marks=FREEING),  # of TorchRec
    (checkpointed_lookups, ValueError, "checkpoint only the dense part"),
    pytest.param(features_freed_early, ValueError, "frees fields that micro_batches", marks=FREEING),
    (whole_batches_changed, RuntimeError, "whole batch before micro_batches divides it"),
    (flat_parameters, ValueError, "use_orig_params=True, or use fully_shard"),
    (static_graph_of_a_list, ValueError, "static_graph=True of Distributed"),
    (named_parameters, ValueError, ""),
    pytest.param(gradient_accumulation_of_torchrec, ValueError, "", marks=ACCUMULATION),
]


@pytest.mark.parametrize(("run", "kind", "words"), PARTNERS, ids=lambda part: getattr(part, "__name__", ""))
@on_ranks(2)
def test_what_works_without_micro_batches_works_with_them_or_is_refused(run, kind, words):
    expected = run(None)
    if words:
        with pytest.raises(kind, match=words):
            run(CAP)
        return
    for got, of_whole in zip(run(CAP), expected, strict=True):
        torch.testing.assert_close(got, of_whole, rtol=1e-5, atol=1e-6)
