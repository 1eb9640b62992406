"""Pipelines that cannot run say what to do instead."""

from __future__ import annotations

import torch
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
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _errors() -> list[str]:
    return [_error_of("native", LoopingModel()), _error_of("prefetch", ranking_model())]


def test_models_and_devices_that_a_pipeline_cannot_run_are_refused(pools):
    for looping, without_gpu in pools(2).run(_errors):
        assert looping.startswith('RuntimeError: pipeline "native" cannot trace the model')
        assert without_gpu == (
            'ValueError: pipeline "prefetch" fills the cache of a GPU, and the device is cpu: use "native"'
        )
