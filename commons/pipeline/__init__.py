"""Train pipelines with the shuffle stage in them."""

from .micro_batch_forward import run_micro_batches
from .train_pipeline_factory import TrainPipelineFactory

__all__ = ["TrainPipelineFactory", "run_micro_batches"]
