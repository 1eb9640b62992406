"""The training run: its arguments, its loop, its figures."""

from commons.training.catalogue_metrics import CatalogueMetrics
from commons.training.entry_point import train_from_gin
from commons.training.metrics import EvaluationMetrics, RankingMetrics, RetrievalMetrics
from commons.training.rank_process import rank_process, run_rank
from commons.training.sharded_model import shard_model
from commons.training.step_vote import NonFiniteLossError
from commons.training.trainer import train
from commons.training.training_args import OptimizerArgs, TensorModelParallelArgs, TrainerArgs
from commons.training.training_task import TrainingTask

__all__ = [
    "CatalogueMetrics",
    "EvaluationMetrics",
    "NonFiniteLossError",
    "OptimizerArgs",
    "RankingMetrics",
    "RetrievalMetrics",
    "TensorModelParallelArgs",
    "TrainerArgs",
    "TrainingTask",
    "rank_process",
    "run_rank",
    "shard_model",
    "train",
    "train_from_gin",
]
