"""The training run: its arguments, its loop, its figures."""

from commons.training.rank_process import rank_process, run_rank
from commons.training.ranking_metrics import RankingMetrics
from commons.training.sharded_model import shard_model
from commons.training.trainer import EvaluationMetrics, TrainingTask, train
from commons.training.training_args import OptimizerArgs, TensorModelParallelArgs, TrainerArgs

__all__ = [
    "EvaluationMetrics",
    "OptimizerArgs",
    "RankingMetrics",
    "TensorModelParallelArgs",
    "TrainerArgs",
    "TrainingTask",
    "rank_process",
    "run_rank",
    "shard_model",
    "train",
]
