"""Pipelines, models and arguments with which the stage cannot run: each error says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import IdentityShuffler
from commons.pipeline import ShuffleStageMixin
from commons.sequence_batch import BaseBatch
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    RankingModel,
    pipeline_of,
    sharded,
    sharded_ranking_model,
)
from tests.on_ranks import on_ranks


class Looping(nn.Module):
    """Loops over looked-up rows where TorchRec traces."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", num_embeddings=50, embedding_dim=4, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])

    def forward(self, batch):
        rows = self.embeddings(batch.features)["item"].to_dense()
        return torch.stack([row.sum() for row in rows]).sum(), None


class Counting(Looping):
    """Turns data into a Python number where TorchRec traces."""

    def forward(self, batch):
        rows = self.embeddings(batch.features)["item"].to_dense()
        return rows[0].sum() * int(batch.features.lengths().sum()), None


class OfScale(Looping):
    """Looks up a field that is named `scale`."""

    def forward(self, batch):
        return self.embeddings(batch.scale)["item"].values().sum(), None


class Returning(nn.Module):
    """Returns a loss in its own way."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._form = form

    def forward(self, batch):
        return self._form(self.weight)


def ended(*_: Any) -> Any:
    raise StopIteration


@dataclass(eq=False)
class Planned(BaseBatch):
    """Has fields whose names a step could have, too."""

    plan: torch.Tensor | None = None
    let_go: torch.Tensor | None = None
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
        batch = next(dataloader_iter, None)
        if batch is None:
            return False
        self.batches.append(batch)
        self.contexts.append(self._create_context())
        self._pipeline_model(batch, self.contexts[-1]) if not self._pipelined_modules else None
        self.start_sparse_data_dist(batch, self.contexts[-1])
        return True


class CallsTheModel(TrainPipelineSparseDist):
    def progress(self, dataloader_iter):
        self._model_fwd = self._model
        return super().progress(dataloader_iter)


def stage_behind() -> None:
    type("Behind", (TrainPipelineSparseDist, ShuffleStageMixin), {})


def made(name: str = "none", shuffler: Any = None, **more: Any) -> Any:
    return pipeline_of(name, nn.Linear(1, 1), None, shuffler, **more)


def given_nothing_on_rank_1() -> None:
    made("none", IdentityShuffler()).progress(iter([None if dist.get_rank() else {"x": torch.ones(2)}]))


def ended_by_the_model(name: str) -> None:
    model, optimizer = sharded_ranking_model()
    model.module.dense.forward = ended
    pipeline_of(name, model, optimizer, TokenShuffler()).progress(iter([histories([1, 2])] * 3))


# Older versions of TorchRec have fewer.
BASES = ("TrainPipelineSemiSync", "TrainPipelineFusedSparseDist", "TrainPipelineSparseDistLite")
OTHERS = [getattr(train_pipelines, name) for name in BASES if hasattr(train_pipelines, name)]
DERIVE = "derive it from TrainPipelineSparseDist or PrefetchTrainPipeline"
TAKE, TRACE = "must take batches from self._next_batch", "cannot trace the model"
EXPECTED = "a pipeline expects (losses, output)"

# A call on each rank, and its error: the type, the value, and the key word of the remedy.
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    **{
        f"stage over {base.__name__}": (partial(run_over, base), TypeError, (DERIVE,))
        for base in (TrainPipelineBase, EvalPipelineSparseDist, StagedTrainPipeline, object, *OTHERS)
    },
    "stage behind": (stage_behind, TypeError, ("class Behind(ShuffleStageMixin, TrainPipelineSparseDist)",)),
    "copies by itself": (partial(run_over, CopiesByItself), TypeError, (TAKE,)),
    "enqueues by itself": (partial(run_over, EnqueuesByItself), TypeError, (TAKE,)),
    "calls the model": (partial(run_over, CallsTheModel), TypeError, ("call self._model_fwd(batch)",)),
    "no shuffler": (made, TypeError, ("batch_shuffler is None", "MyShuffler()")),
    "a shuffler's name": (partial(made, "none", "identity"), TypeError, ("'identity'", "BatchShuffler")),
    "TorchRec's argument": (
        lambda: made("none", IdentityShuffler(), pipeline_postproc=True),
        ValueError,
        ('"none" takes no pipeline_postproc',),
    ),
    "None for a batch": (given_nothing_on_rank_1, TypeError, ("gave None for a batch", "StopIteration")),
    "prefetch": (lambda: run("prefetch", RankingModel()), ValueError, ("device is cpu", 'use "native"')),
    "a loop": (lambda: run("native", Looping()), RuntimeError, (TRACE, "TraceError", "in a submodule")),
    "a number": (lambda: run("native", Counting()), RuntimeError, (TRACE, "int()", "in a submodule")),
    "a loss alone": (
        lambda: run("none", Returning(lambda loss: loss)),
        TypeError,
        ("a Parameter of shape ()", EXPECTED, "return loss, None"),
    ),
    "three outputs": (
        lambda: run("none", Returning(lambda loss: (loss, None, None))),
        TypeError,
        ("a tuple of Parameter, NoneType, NoneType", EXPECTED),
    ),
    **{
        f"a StopIteration of the model, {name}": (
            partial(ended_by_the_model, name),
            RuntimeError,
            ("raised StopIteration() in a step",),
        )
        for name in ("none", "native")
    },
    **{
        f"a field named {name}": (
            partial(run, "native", RankingModel(), **{name: torch.ones(1)}),
            TypeError,
            (f"Planned has tensors in {name!r}", "rename"),
        )
        for name in ("plan", "let_go")
    },
}


@pytest.mark.parametrize("name", REFUSALS)
@on_ranks(2)
def test_what_cannot_run_is_refused_on_all_ranks(name):
    call, kind, words = REFUSALS[name]
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


@on_ranks(2)
def test_a_field_may_be_named_scale_or_plan_where_no_step_hides_it():
    ids = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([3]))
    run("native", OfScale(), scale=ids)
    run("none", Returning(lambda loss: (loss, None)), plan=torch.ones(1), let_go=torch.ones(1))
