"""Pipelines that cannot run say what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.histories import histories
from tests.commons.pipeline.ranking_pipelines import CPU, RankingModel, pipeline_of, sharded
from tests.on_ranks import on_ranks


class LoopingModel(torch.nn.Module):
    """Loops over looked-up rows where TorchRec traces."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", num_embeddings=50, embedding_dim=4, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])

    def forward(self, batch):
        rows = self.embeddings(batch.features)["item"].to_dense()
        return torch.stack([row.sum() for row in rows]).sum(), None


class CountingModel(LoopingModel):
    """Turns data into a Python number where TorchRec traces."""

    def forward(self, batch):
        rows = self.embeddings(batch.features)["item"].to_dense()
        return rows[0].sum() * int(batch.features.lengths().sum()), None


class ModelOfScale(LoopingModel):
    """Looks up a field that is named `scale`."""

    def forward(self, batch):
        return self.embeddings(batch.scale)["item"].values().sum(), None


class Returning(torch.nn.Module):
    """Returns a loss in its own way."""

    def __init__(self, form) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._form = form

    def forward(self, batch):
        return {"loss": self.weight, "dict": {"ctr": self.weight}, "three": (self.weight, None, None)}[
            self._form
        ]


@pytest.mark.parametrize("name", ["none", "native"])
def test_a_pipeline_without_a_shuffler_says_how_to_make_one(name):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        TypeError, match=r"^batch_shuffler is None; expected a BatchShuffler, such as MyShuffler\(\)"
    ):
        TrainPipelineFactory.create(name, model=model, optimizer=optimizer, device=CPU, loss_reduction="sum")


@dataclass(eq=False)
class Planned(BaseBatch):
    """Has fields whose names a step could have, too."""

    plan: torch.Tensor | None = None
    let_go: torch.Tensor | None = None
    scale: KeyedJaggedTensor | None = None


def _error_of_model(name: str, model: torch.nn.Module, **more: Any) -> str:
    replicated, optimizer = sharded(model)

    def train() -> None:
        pipeline = pipeline_of(name, replicated, optimizer, BatchShufflerFactory.create("identity"))
        batch = histories([2])
        pipeline.progress(iter([Planned(batch.features, 1, {}, **more) if more else batch]))

    return error_of(train)


@on_ranks(2)
def test_models_and_devices_that_a_pipeline_cannot_run_are_refused():
    native = [_error_of_model("native", model()) for model in (LoopingModel, CountingModel)]
    looping, counting, without_gpu = [*native, _error_of_model("prefetch", RankingModel())]
    assert looping.startswith("RuntimeError: SparseDistTrainPipeline cannot trace the model (TraceError")
    assert counting.startswith(
        "RuntimeError: SparseDistTrainPipeline cannot trace the model (TypeError: int()"
    )
    assert "do the rest in a submodule" in looping and "do the rest in a submodule" in counting
    assert without_gpu == (
        'ValueError: pipeline "prefetch" fills the cache of a GPU, and the device is cpu: use "native"'
    )


@on_ranks(2)
def test_fields_that_a_step_would_hide_from_torchrec_are_refused():
    for name in ("plan", "let_go"):
        field = {name: torch.ones(1)}
        assert f"Planned has tensors in {name!r}" in _error_of_model("native", RankingModel(), **field)
        assert "Planned" not in _error_of_model("none", RankingModel(), **field)


@on_ranks(2)
def test_a_field_may_be_named_scale():
    ids = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([3]))
    assert _error_of_model("native", ModelOfScale(), scale=ids) == "no error"


@on_ranks(2)
def test_what_a_model_returns_is_checked():
    errors = []
    for form in ("loss", "dict", "three"):
        model, shuffler = Returning(form), BatchShufflerFactory.create("identity")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline = pipeline_of("none", model, optimizer, shuffler, "mean")
        errors.append(error_of(pipeline.progress, iter([{"x": torch.ones(2)}])))
        pipeline.reset()
    loss, of_dict, three = errors
    assert loss.startswith(
        "TypeError: the model returned a Parameter of shape (); a pipeline expects (losses, output)"
    )
    assert "the model returned a dict; a pipeline expects (losses, output)" in of_dict
    assert "the model returned a tuple of Parameter, NoneType, NoneType; a pipeline" in three


@on_ranks(2)
def test_wrong_arguments_and_loaders_are_refused():
    model, shuffler = Returning("loss"), BatchShufflerFactory.create("identity")
    loader = iter([None] if dist.get_rank() else [{"x": torch.ones(2)}])
    name, of_class, of_torchrec, nothing = [
        error_of(pipeline_of, "none", model, None, "identity"),
        error_of(pipeline_of, "none", model, None, type(shuffler)),
        error_of(pipeline_of, "none", model, None, shuffler, pipeline_postproc=True),
        error_of(pipeline_of("none", model, None, shuffler).progress, loader),
    ]
    assert name.startswith("TypeError: batch_shuffler is 'identity'; expected a BatchShuffler")
    assert "expected a BatchShuffler" in of_class
    assert of_torchrec.startswith('ValueError: pipeline "none" takes no pipeline_postproc')
    assert nothing.startswith("TypeError: a loader gave None for a batch")
