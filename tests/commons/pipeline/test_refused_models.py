"""Pipelines that cannot run say what to do instead."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig

from commons.distributed import BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model


class LoopingModel(torch.nn.Module):
    """Looks rows up, and loops over them where TorchRec traces."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", num_embeddings=50, embedding_dim=4, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])

    def forward(self, batch):
        rows = self.embeddings(batch.features)["item"].to_dense()
        return torch.stack([row.sum() for row in rows]).sum(), None


class CountingModel(LoopingModel):
    """Makes a Python number of what TorchRec traces."""

    def forward(self, batch):
        rows = self.embeddings(batch.features)["item"].to_dense()
        return rows[0].sum() * int(batch.features.lengths().sum()), None


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


def _error_of(pipeline_name: str, model: torch.nn.Module) -> str:
    device = torch.device("cpu")
    sharded, optimizer = shard_model(model, OptimizerArgs("sgd", 0.1), device)
    shuffler = BatchShufflerFactory.create("identity")
    try:
        pipeline = TrainPipelineFactory.create(
            pipeline_name,
            model=sharded,
            optimizer=optimizer,
            device=device,
            batch_shuffler=shuffler,
            loss_reduction="sum",
        )
        pipeline.progress(iter([hstu_batch([Sample([1], [], [1, 2], [1, 2], 0, [1, 2])])]))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _errors() -> list[str]:
    native = [_error_of("native", model()) for model in (LoopingModel, CountingModel)]
    return [*native, _error_of("prefetch", ranking_model())]


def test_models_and_devices_that_a_pipeline_cannot_run_are_refused(pools):
    for looping, counting, without_gpu in pools(2).run(_errors):
        assert looping.startswith('RuntimeError: pipeline "native" cannot trace the model (TraceError')
        assert counting.startswith('RuntimeError: pipeline "native" cannot trace the model (TypeError: int()')
        assert "do the rest in a submodule" in looping and "do the rest in a submodule" in counting
        assert without_gpu == (
            'ValueError: pipeline "prefetch" fills the cache of a GPU, and the device is cpu: use "native"'
        )


def _returned() -> list[str]:
    errors = []
    for form in ("loss", "dict", "three"):
        model = Returning(form)
        pipeline = TrainPipelineFactory.create(
            "none",
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            device=torch.device("cpu"),
            batch_shuffler=BatchShufflerFactory.create("identity"),
            loss_reduction="mean",
        )
        try:
            pipeline.progress(iter([{"x": torch.ones(2)}]))
        except TypeError as error:
            errors.append(str(error))
        pipeline.reset()
    return errors


def test_what_a_model_returns_is_checked(pools):
    for loss, of_dict, three in pools(2).run(_returned):
        assert loss.startswith(
            "the model returned a Parameter of shape (); a pipeline expects (losses, output)"
        )
        assert of_dict.startswith("the model returned a dict; a pipeline expects (losses, output)")
        assert three.startswith("the model returned a tuple of Parameter, NoneType, NoneType; a pipeline")


def _wrong_arguments() -> list[str]:
    model = Returning("loss")
    given = {"model": model, "optimizer": None, "device": torch.device("cpu"), "loss_reduction": "sum"}
    shuffler = BatchShufflerFactory.create("identity")
    calls = [
        ("none", {"batch_shuffler": "identity"}),
        ("none", {"batch_shuffler": type(shuffler)}),
        ("none", {"batch_shuffler": shuffler, "pipeline_postproc": True}),
    ]
    errors = []
    for name, more in calls:
        try:
            TrainPipelineFactory.create(name, **given, **more)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    pipeline = TrainPipelineFactory.create("none", **given, batch_shuffler=shuffler)
    loader = iter([None] if dist.get_rank() else [{"x": torch.ones(2)}])
    try:
        pipeline.progress(loader)
    except TypeError as error:
        errors.append(str(error))
    return errors


def test_wrong_arguments_and_loaders_are_told(pools):
    for name, of_class, of_torchrec, nothing in pools(2).run(_wrong_arguments):
        assert name.startswith("batch_shuffler is 'identity'; expected a BatchShuffler")
        assert "expected a BatchShuffler" in of_class
        assert of_torchrec.startswith('pipeline "none" takes no pipeline_postproc')
        assert nothing.startswith("a loader gave None for a batch")
