"""TorchRec's train pipelines with the shuffle stage."""

from .train_pipelines import (
    PrefetchTrainPipeline,
    SequentialTrainPipeline,
    ShuffleStageMixin,
    SparseDistTrainPipeline,
    TrainPipelineFactory,
)

__all__ = [
    "PrefetchTrainPipeline",
    "SequentialTrainPipeline",
    "ShuffleStageMixin",
    "SparseDistTrainPipeline",
    "TrainPipelineFactory",
]
