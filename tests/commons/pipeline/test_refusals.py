"""Pipelines, models and arguments with which the stage cannot run: each error says what to do instead."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import IdentityShuffler
from commons.pipeline import ShuffleStageMixin
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    RankingModel,
    pipeline_of,
    sharded,
    sharded_ranking_model,
)
from tests.on_ranks import on_ranks


class OfScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", num_embeddings=50, embedding_dim=4, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])

    def forward(self, batch):
        return self.embeddings(batch.scale)["item"].values().sum(), None


class Returning(nn.Module):
    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._form = form

    def forward(self, batch):
        return self._form(self.weight)


@dataclass(eq=False)
class Planned(BaseBatch):
    plan: torch.Tensor | None = None
    scale: KeyedJaggedTensor | None = None


def run(name: str, model: nn.Module, **fields: Any) -> None:
    """Runs a step of a model on a batch, or on one with more fields."""
    batch = histories([2])
    if fields:
        batch = Planned(batch.features, 1, {}, **fields)
    pipeline = pipeline_of(name, *sharded(model), IdentityShuffler())
    try:
        pipeline.progress(iter([batch]))
    finally:
        pipeline.reset()


def run_over(base: type) -> None:
    """Runs a step of the stage over another pipeline."""
    over = type("Over", (ShuffleStageMixin, base), {})
    over(*sharded_ranking_model(), CPU, TokenShuffler(), "sum").progress(iter([histories([2])] * 3))


class CopiesByItself(TrainPipelineSparseDist):
    def copy_batch_to_gpu(self, dataloader_iter):
        return next(dataloader_iter), self._create_context()


class EnqueuesByItself(TrainPipelineSparseDist):
    def enqueue_batch(self, dataloader_iter):
        self.batches.append(next(dataloader_iter))
        self.contexts.append(self._create_context())
        self._pipeline_model(self.batches[-1], self.contexts[-1])


class CallsTheModel(TrainPipelineSparseDist):
    def progress(self, dataloader_iter):
        self._model_fwd = self._model
        return super().progress(dataloader_iter)


def made(name: str = "none", shuffler: Any = None, **more: Any) -> Any:
    return pipeline_of(name, nn.Linear(1, 1), None, shuffler, **more)


def given_nothing_on_rank_1() -> None:
    made("none", IdentityShuffler()).progress(iter([None if dist.get_rank() else {"x": torch.ones(2)}]))


def ended_by_the_model() -> None:
    model, optimizer = sharded_ranking_model()
    model.module.dense.forward = lambda *_: next(iter(()))
    pipeline_of("native", model, optimizer, TokenShuffler()).progress(iter([histories([1, 2])] * 3))


TAKE = "must take batches from self._next_batch"
DERIVE = "Base is, or directly extends, TrainPipelineSparseDist or PrefetchTrainPipeline"

# A call on each rank, and what its error has in it: the type, the value, and the key word of the remedy.
REFUSALS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "stage over another pipeline": (partial(run_over, EvalPipelineSparseDist), ["TypeError", DERIVE]),
    "stage behind": (
        lambda: type("Behind", (TrainPipelineSparseDist, ShuffleStageMixin), {}),
        ["TypeError", "class Behind(ShuffleStageMixin, Base)"],
    ),
    "copies by itself": (partial(run_over, CopiesByItself), ["TypeError", TAKE]),
    "enqueues by itself": (partial(run_over, EnqueuesByItself), ["TypeError", TAKE]),
    "calls the model": (partial(run_over, CallsTheModel), ["TypeError", "call self._model_fwd(batch)"]),
    "a shuffler's name": (partial(made, "none", "identity"), ["TypeError: ", "'identity'", "BatchShuffler"]),
    "copies in place": (
        partial(made, "native", enable_inplace_copy_batch=True),
        ["ValueError", "copies of enable_inplace_copy_batch", "bypass the exchange"],
    ),
    "copies in place, until TorchRec 1.5": (
        partial(made, "native", inplace_copy_batch_to_gpu=True),
        ["ValueError", "copies of inplace_copy_batch_to_gpu", "bypass the exchange"],
    ),
    "another stream for lookups": (
        partial(made, "fused", emb_lookup_stream="new"),
        ["ValueError", "no other emb_lookup_stream", "leave it out"],
    ),
    "None for a batch": (given_nothing_on_rank_1, ["TypeError", "NoneType has no rows"]),
    "prefetch": (lambda: run("prefetch", RankingModel()), ["ValueError", "needs a GPU", 'use "native"']),
    "a loss alone": (
        lambda: run("none", Returning(lambda loss: loss)),
        ["TypeError", "Parameter; a pipeline expects (losses, output)", "return loss, None"],
    ),
    "a StopIteration of the model": (
        ended_by_the_model,
        ["RuntimeError", "raised StopIteration()"],
    ),
    "a field named plan": (
        lambda: run("native", RankingModel(), plan=torch.ones(1)),
        ["TypeError", "Planned has tensors in 'plan'", "rename"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@on_ranks(2)
def test_what_cannot_run_is_refused_on_all_ranks(name):
    call, words = REFUSALS[name]
    error = error_of(call)
    assert all(word in error for word in words), error


@on_ranks(2)
def test_a_field_may_be_named_scale_or_plan_where_no_step_hides_it():
    ids = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([3]))
    run("native", OfScale(), scale=ids)
    run("none", Returning(lambda loss: (loss, None)), plan=torch.ones(1))
