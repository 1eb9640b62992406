"""Training runs: arguments, training loop, metrics, and entry point."""

try:
    import gin  # noqa: F401
except ModuleNotFoundError as error:  # PyPI's package named gin is unrelated
    raise ModuleNotFoundError(
        'gin-config is not installed; it comes with the extra "train": in a checkout, pip install ".[train]"',
        name="gin",
    ) from error

from .catalogue_metrics import CatalogueMetrics
from .entry_point import train_from_gin
from .metrics import EvaluationMetrics, RankingMetrics, RetrievalMetrics
from .rank_process import rank_process, run_rank
from .sharded_model import shard_model
from .step_vote import NonFiniteLossError
from .trainer import train
from .training_args import OptimizerArgs, TensorModelParallelArgs, TrainerArgs
from .training_task import TrainingTask

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
