"""Train pipelines by name."""

from __future__ import annotations

from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline

from commons.pipeline.train_pipelines import SequentialTrainPipeline, SparseDistTrainPipeline
from commons.registry import NamedFactory


class TrainPipelineFactory(NamedFactory[TrainPipeline]):
    """Registers train pipelines and creates them by name.

    `create(name, model=, optimizer=, device=, batch_shuffler=)`, where name is "none" (nothing overlapped) or
    "native" (TorchRec's sparse-dist pipeline).
    """

    kind = "train pipeline"
    base = TrainPipeline


TrainPipelineFactory.register("none", SequentialTrainPipeline)
TrainPipelineFactory.register("native", SparseDistTrainPipeline)
