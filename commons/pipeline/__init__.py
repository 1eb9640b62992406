"""Train pipelines with the shuffle stage in them."""

from .train_pipeline_factory import TrainPipelineFactory

__all__ = ["TrainPipelineFactory"]
