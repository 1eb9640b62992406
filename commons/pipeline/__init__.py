"""Train pipelines with the shuffle stage in them."""

from commons.pipeline.micro_batch_forward import run_micro_batches
from commons.pipeline.train_pipeline_factory import TrainPipelineFactory

__all__ = ["TrainPipelineFactory", "run_micro_batches"]
