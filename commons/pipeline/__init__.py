"""TorchRec's train pipelines with the shuffle stage."""

from .train_pipelines import ShuffleStageMixin, SparseDistTrainPipeline, TrainPipelineFactory

__all__ = ["ShuffleStageMixin", "SparseDistTrainPipeline", "TrainPipelineFactory"]
