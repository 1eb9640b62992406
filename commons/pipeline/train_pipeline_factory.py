"""Train pipelines by name."""

from __future__ import annotations

from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline

from ..registry import NamedFactory
from .train_pipelines import (
    PrefetchTrainPipeline,
    SequentialTrainPipeline,
    SparseDistTrainPipeline,
)


class TrainPipelineFactory(NamedFactory[TrainPipeline]):
    """Registers train pipelines and creates them by name.

    `create(name, model=, optimizer=, device=, batch_shuffler=, loss_reduction=)`, where name is "none" (only
    planning is overlapped), "native" (TorchRec's sparse-dist pipeline) or "prefetch" (the same with cached
    tables; CUDA only).
    """

    kind = "train pipeline"
    base = TrainPipeline


TrainPipelineFactory.register("none", SequentialTrainPipeline)
TrainPipelineFactory.register("native", SparseDistTrainPipeline)
TrainPipelineFactory.register("prefetch", PrefetchTrainPipeline)
