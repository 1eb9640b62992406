"""Gin settings of a training run, common to all models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gin

from ..checks import check_types
from ..datasets.gin_values import require_setting, require_settings_at_least
from ..distributed.settings import ShufflerSettings
from ..local_paths import expand_paths
from ..perf_model.cost import Cost
from .balance_flags import CORE, FLOPS, LEARNED, SETS, check_flags

# A run that learns costs writes this file to `log_dir` at its end.
LEARNED_COST_FILE = "learned_cost.json"


@gin.configurable
@dataclass
class TrainerArgs:
    """Settings of a training run.

    Attributes:
        train_batch_size: rows per rank and step.
        eval_batch_size: rows per rank and step of an evaluation. None means `train_batch_size`.
        eval_interval: steps between evaluations.
        log_interval: steps between log lines.
        max_train_iters: number of steps to train. None means one epoch.
        max_eval_iters: number of steps per evaluation. None means the whole set.
        seed: seed of parameters and sample order.
        hang_timeout_s: seconds that a step, an evaluation batch, or a checkpoint may take. After that, a rank
            writes its threads' stacks to `stacks` in `log_dir` and keeps waiting. None means no limit.
        gc_interval: steps between garbage collections, synchronized over ranks. None leaves them to Python.
        profile: whether each rank writes a trace of some steps to `traces` in `log_dir`.
        profile_step_start, profile_step_end: first traced step, and first step after the trace.
        ckpt_save_interval: steps between checkpoints. −1, or more than the run's steps, means none. With
            checkpoints, a run resumes from the newest intact one in `ckpt_save_dir`, and saves one at its
            end. SIGTERM to any rank makes all ranks save one and stop.
        ckpt_save_dir: folder of the checkpoints, visible to all ranks.
        ckpt_load_dir: folder whose newest intact checkpoint a run starts from if `ckpt_save_dir` has none.
            Empty means none.
        ckpt_keep: number of checkpoints to keep. None means all.
        best_metric: name of an evaluation's metric, such as "NDCG@10". The folder `best` in `ckpt_save_dir`
            keeps the checkpoint with its largest value. Empty means none.
        early_stop_patience: number of evaluations in a row without a larger `best_metric` after which
            training stops. None means that it goes on.
        pipeline_type: "none", "native", "prefetch", "lite", "fused", or "semi_sync".
        enable_balanced_shuffler: whether samples move between ranks to balance their loads.
        batch_shuffler: registered name of the shuffler. Empty means the model's own.
        balance_partitioner, balance_tolerance, balance_equal_rows, balance_max_tokens,
            balance_token_tolerance, balance_exchange: fields of `ShufflerSettings`.
        balance_group_feature, balance_moves_per_copy: arguments of `SampleGroups`. A feature of None means no
            groups, or the groups from the shuffler's own `get_groups`.
        balance_cost: cost of a sample. "flops" means the shuffler's workloads. "learned" means
            `LearnedCosts`, which measures costs and rank speeds during training. Otherwise, a cost file that
            a calibration of the model wrote.
        balance_speed_limit: argument of `LearnedCosts`.
        balance_verify: whether ranks compare plans and samples; see `Verification`.
        balance_split: whether long samples are divided into pieces; see `Pieces`.
        max_tokens_per_micro_batch: token limit of `MicroBatches`. None means whole batches.
        single_rank_load: whether rank 0 loads the samples of all ranks, and the shuffler spreads them.
        log_dir: folder of logged figures, as JSON lines and for TensorBoard.
        peak_tflops: peak TFLOP/s of one device at the model's precision, for MFU. None omits MFU.
        top_k_for_generation: number of items a generative model retrieves per sample; also its beam width.
        eval_metrics: metrics of a generative model's retrieval, such as "HitRate@10".

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range or has no effect with the others, or `balance_cost` names a file
            that is not a cost file.
        FileNotFoundError: the file that `balance_cost` names does not exist.
        ModuleNotFoundError: an extension that a setting enables is not installed.
    """

    train_batch_size: int
    eval_batch_size: int | None = None
    eval_interval: int = 100
    log_interval: int = 100
    max_train_iters: int | None = None
    max_eval_iters: int | None = None
    seed: int = 1234
    hang_timeout_s: float | None = 300.0
    gc_interval: int | None = 50
    profile: bool = False
    profile_step_start: int = 100
    profile_step_end: int = 200
    ckpt_save_interval: int = -1
    ckpt_save_dir: str = "./checkpoints"
    ckpt_load_dir: str = ""
    ckpt_keep: int | None = None
    best_metric: str = ""
    early_stop_patience: int | None = None
    pipeline_type: str = "native"
    enable_balanced_shuffler: bool = False
    batch_shuffler: str = ""
    balance_partitioner: str = ShufflerSettings.partitioner
    balance_tolerance: float | None = ShufflerSettings.tolerance
    balance_equal_rows: bool = ShufflerSettings.equal_rows
    balance_max_tokens: int | None = ShufflerSettings.max_tokens
    balance_token_tolerance: float | None = ShufflerSettings.token_tolerance
    balance_group_feature: str | None = None
    balance_moves_per_copy: float = 64.0
    balance_cost: str = FLOPS
    balance_exchange: str = ShufflerSettings.exchange
    balance_verify: bool = False
    balance_split: bool = False
    balance_speed_limit: float = 2.0
    max_tokens_per_micro_batch: int | None = None
    single_rank_load: bool = False
    log_dir: str = "out/logs"
    peak_tflops: float | None = None
    top_k_for_generation: int = 10
    eval_metrics: tuple[str, ...] = ("HitRate@10", "Recall@10", "NDCG@10")

    def __post_init__(self) -> None:
        check_types(self)
        cost_file = () if self.balance_cost in (FLOPS, LEARNED) else ("balance_cost",)
        expand_paths(self, "ckpt_save_dir", "ckpt_load_dir", "log_dir", *cost_file)
        counts = ("train_batch_size", "eval_interval", "log_interval", "top_k_for_generation")
        optional = ("eval_batch_size", "max_train_iters", "max_eval_iters", "ckpt_keep", "gc_interval")
        require_settings_at_least(1, self, "early_stop_patience")
        has_metric = self.early_stop_patience is None or self.best_metric != ""
        require_setting(self, has_metric, "early_stop_patience", "None without best_metric")
        require_settings_at_least(1, self, *counts, "profile_step_start", *optional)
        require_settings_at_least(0, self, "seed")
        require_setting(self, self.seed < 2**62, "seed", "less than 2**62: each rank adds its number")
        in_seconds = "seconds, above 0 and finite, or None for never"
        for name, expected in (("peak_tflops", "a number above 0"), ("hang_timeout_s", in_seconds)):
            value = getattr(self, name)
            require_setting(self, value is None or 0 < value < float("inf"), name, expected)
        expected = f"more than profile_step_start = {self.profile_step_start}: the first not traced"
        is_range = self.profile_step_end > self.profile_step_start
        require_setting(self, is_range, "profile_step_end", expected)
        is_interval = self.ckpt_save_interval == -1 or self.ckpt_save_interval >= 1
        expected = "steps, at least 1, or -1 for no checkpoints"
        require_setting(self, is_interval, "ckpt_save_interval", expected)
        is_spread = self.enable_balanced_shuffler or not self.single_rank_load
        expected = "False without enable_balanced_shuffler, which is what spreads the samples"
        require_setting(self, is_spread, "single_rank_load", expected)
        is_default = self.balance_speed_limit == TrainerArgs.balance_speed_limit
        expected = f'its default without balance_cost = "{LEARNED}"'
        require_setting(self, is_default or self.balance_cost == LEARNED, "balance_speed_limit", expected)
        if cost_file:
            if not Path(self.balance_cost).exists():
                raise FileNotFoundError(
                    f'TrainerArgs.balance_cost = {self.balance_cost!r}: expected "{FLOPS}", "{LEARNED}", or '
                    "a file written by a calibration"
                )
            Cost.load(Path(self.balance_cost))
        check_flags(self)

    def saves_within(self, num_steps: int) -> bool:
        """Returns whether a checkpoint is due within `num_steps` steps."""
        return 0 < self.ckpt_save_interval <= num_steps

    def written_folders(self, num_steps: int) -> dict[str, str]:
        """Returns the folders that a run of `num_steps` steps writes to, by the name of their setting."""
        saves = self.saves_within(num_steps) or (num_steps > 0 and self.best_metric)
        settings = ["log_dir", "ckpt_save_dir"] if saves else ["log_dir"]
        return {f"TrainerArgs.{name}": getattr(self, name) for name in settings}

    @property
    def eval_rows(self) -> int:
        """Rows per rank and step of an evaluation."""
        return self.train_batch_size if self.eval_batch_size is None else self.eval_batch_size

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of one device."""
        return None if self.peak_tflops is None else self.peak_tflops * 1e12

    @property
    def balance_settings(self) -> dict[str, Any]:
        """Keyword arguments of the shuffler: its cost, and settings that differ from their defaults."""
        settings: dict[str, Any] = {
            SETS[CORE][flag]: value for flag, value in self.changed() if flag in SETS[CORE]
        }
        if self.balance_cost not in (FLOPS, LEARNED):
            settings["cost"] = Cost.load(Path(self.balance_cost))
        return settings

    def cost_file(self) -> Path | None:
        """Returns the file of the measured cost, or of the cost that this run learned; None without one."""
        if self.balance_cost == LEARNED:
            learned = Path(self.log_dir) / LEARNED_COST_FILE
            return learned if learned.exists() else None
        return None if self.balance_cost == FLOPS else Path(self.balance_cost)

    def settings_without_effect(self) -> list[str]:
        """Returns one line for each setting that has no effect."""
        if self.enable_balanced_shuffler:
            return []
        return [
            f"TrainerArgs.{name} = {value!r} has no effect without enable_balanced_shuffler: samples stay "
            "where they are loaded"
            for name, value in self.changed()
            if name.startswith(("batch_shuffler", "balance_"))
        ]

    def changed(self) -> list[tuple[str, Any]]:
        """Returns the settings that differ from their defaults, with their values."""
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return [(name, value) for name, value, default in values if value != default]


_OPTIMIZERS = ("adam", "adagrad", "sgd")


@gin.configurable
@dataclass
class OptimizerArgs:
    """The optimizer of dense parameters and embedding tables.

    Attributes:
        optimizer_str: "adam", "adagrad", or "sgd". Case does not matter.
        learning_rate: learning rate of dense parameters and tables.
        adam_beta1, adam_beta2, adam_eps: hyperparameters of Adam.
        weight_decay: factor of the L2 penalty that torch's optimizers add to the gradients of dense
            parameters, replicated tables included. Sharded tables do not decay.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: the optimizer is unknown, or a value is out of range.
    """

    optimizer_str: str
    learning_rate: float
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        self.optimizer_str = self.optimizer_str.lower()
        known = f"one of {', '.join(_OPTIMIZERS)}"
        require_setting(self, self.optimizer_str in _OPTIMIZERS, "optimizer_str", known)
        for name in ("learning_rate", "adam_eps", "weight_decay"):
            require_setting(self, 0 <= getattr(self, name) < float("inf"), name, "finite, and at least 0")
        for name in ("adam_beta1", "adam_beta2"):
            require_setting(self, 0 <= getattr(self, name) < 1, name, "at least 0 and less than 1")


@gin.configurable
@dataclass
class TensorModelParallelArgs:
    """Tensor parallelism, which existing gin files configure. Only a size of 1 runs here.

    Raises:
        TypeError: `tensor_model_parallel_size` is not an integer.
        ValueError: `tensor_model_parallel_size` is not 1.
    """

    tensor_model_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        expected = "1: training here is data-parallel, with model-parallel embedding tables"
        name = "tensor_model_parallel_size"
        require_setting(self, self.tensor_model_parallel_size == 1, name, expected)
