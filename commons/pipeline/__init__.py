"""Train pipelines with the shuffle stage in them."""

from .train_pipelines import TrainPipelineFactory

__all__ = ["TrainPipelineFactory"]
