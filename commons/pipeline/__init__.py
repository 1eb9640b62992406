"""Train pipelines with the shuffle stage in them."""

from commons.pipeline.train_pipeline_factory import TrainPipelineFactory

__all__ = ["TrainPipelineFactory"]
