"""Train pipelines with the shuffle stage in them."""

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
