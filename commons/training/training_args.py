"""What gin files say about training, whatever the model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gin

from commons.distributed.exchange import EXCHANGES
from commons.distributed.shuffler_settings import PARTITIONERS
from commons.perf_model import MeasuredCost


def require(condition: bool, setting: str, value: object, expected: str) -> None:
    """Raises a ValueError that names the setting and its value unless `condition` holds."""
    if not condition:
        raise ValueError(f"{setting} = {value!r}: expected {expected}")


def require_at_least(minimum: int, setting: str, value: object) -> None:
    """Raises a ValueError that names the setting and its value unless it is such an integer."""
    fits = isinstance(value, int) and value >= minimum
    require(fits, setting, value, f"an integer of at least {minimum}")


# The costs that are no file's.
FLOPS = "flops"


@gin.configurable
@dataclass
class TrainerArgs:
    """The training run.

    Attributes:
        train_batch_size: rows per rank and step.
        eval_batch_size: rows per rank in evaluation; None for `train_batch_size`.
        eval_interval: steps between evaluations.
        log_interval: steps between log lines.
        max_train_iters: steps to train; None for one epoch.
        max_eval_iters: steps of one evaluation; None for the whole set.
        seed: of parameters and of the samples' order.
        hang_timeout_s: seconds that a step, a batch of an evaluation or a checkpoint may take before a rank
            writes the stacks of its threads to `stacks` of `log_dir`, and goes on waiting; None for never.
        gc_interval: steps between collections of Python's garbage, on all ranks at the same time; None for
            whenever Python sees fit.
        profile: whether steps are traced, on each rank to a file in `traces` of `log_dir`.
        profile_step_start, profile_step_end: the first step that is traced, and the first that is no more.
        ckpt_save_interval: steps between checkpoints; −1 for none, and so is a number beyond the run's
            steps, with a warning. With checkpoints, a run starts from the newest whole one in
            `ckpt_save_dir`, ends with one, and SIGTERM to a rank makes all write one and end. Without, it
            neither writes nor reads `ckpt_save_dir`.
        ckpt_save_dir: folder of the checkpoints, which all ranks see.
        ckpt_load_dir: folder of checkpoints to start from, at the step of the newest whole one, unless one
            of `ckpt_save_dir` was read; empty for none.
        ckpt_keep: checkpoints to keep; None for all.
        pipeline_type: "none", "native" or "prefetch".
        enable_balanced_shuffler: whether samples move between ranks so that all have the same load.
        batch_shuffler: registered name of the shuffler that does it; empty for the model's own.
        balance_partitioner, balance_tolerance, balance_equal_rows, balance_max_tokens: how the shuffler
            places samples, as `BatchShuffler` takes them without "balance_".
        balance_window, balance_window_max_step_ratio: steps that are planned together, likewise; more than 1
            changes what a step contains.
        balance_cost: what a sample costs: "flops" for the shuffler's own workloads, or the path of a file
            with times that were measured, as a calibration writes it.
        balance_exchange, balance_planning_backend, balance_verify: how ranks talk to each other, likewise.
        max_tokens_per_micro_batch: makes every step run in micro-batches of at most so many tokens, as many
            on every rank, which bounds the memory of activations; None for steps that run whole.
        small_micro_batches_at_ends: whether the lightest micro-batches come first and last, not only first.
        single_rank_load: whether rank 0 loads the samples of all ranks, and the shuffler spreads them.
        log_dir: where the figures are written, as JSON lines and for TensorBoard.
        peak_tflops: what one device computes at best, in 10¹² FLOP/s at the model's precision; with it the
            share of that which is used is shown (MFU). None if it is not known.
        top_k_for_generation: items that a generative model retrieves per sample, and beams of its search.
        eval_metrics: of a generative model's retrieval, as in "HitRate@10".

    Raises:
        ValueError: a value is out of range, or the file of `balance_cost` is something else.
        FileNotFoundError: there is no such file.
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
    pipeline_type: str = "native"
    enable_balanced_shuffler: bool = False
    batch_shuffler: str = ""
    balance_partitioner: str = "refined"
    balance_tolerance: float | None = None
    balance_equal_rows: bool = True
    balance_max_tokens: int | None = None
    balance_window: int = 1
    balance_window_max_step_ratio: float | None = None
    balance_cost: str = FLOPS
    balance_exchange: str = "all_to_all"
    balance_verify: bool = False
    max_tokens_per_micro_batch: int | None = None
    small_micro_batches_at_ends: bool = False
    single_rank_load: bool = False
    log_dir: str = "out/logs"
    peak_tflops: float | None = None
    top_k_for_generation: int = 10
    eval_metrics: tuple[str, ...] = ("HitRate@10", "Recall@10", "NDCG@10")

    def __post_init__(self) -> None:
        for name in (
            "train_batch_size",
            "eval_interval",
            "log_interval",
            "top_k_for_generation",
            "balance_window",
            "profile_step_start",
        ):
            require_at_least(1, f"TrainerArgs.{name}", getattr(self, name))
        for name in (
            "eval_batch_size",
            "max_train_iters",
            "max_eval_iters",
            "balance_max_tokens",
            "max_tokens_per_micro_batch",
            "ckpt_keep",
            "gc_interval",
        ):
            if getattr(self, name) is not None:
                require_at_least(1, f"TrainerArgs.{name}", getattr(self, name))
        require_at_least(0, "TrainerArgs.seed", self.seed)
        if self.peak_tflops is not None:
            peak = self.peak_tflops
            require(0 < peak < float("inf"), "TrainerArgs.peak_tflops", peak, "a number above 0")
        if self.hang_timeout_s is not None:
            fits = 0 < self.hang_timeout_s < float("inf")
            expected = "seconds, above 0 and finite, or None for never"
            require(fits, "TrainerArgs.hang_timeout_s", self.hang_timeout_s, expected)
        require(
            isinstance(self.profile_step_end, int) and self.profile_step_end > self.profile_step_start,
            "TrainerArgs.profile_step_end",
            self.profile_step_end,
            f"an integer above profile_step_start = {self.profile_step_start}: the first not traced",
        )
        interval = self.ckpt_save_interval
        expected = "steps, at least 1, or -1 for no checkpoints"
        require(interval == -1 or interval >= 1, "TrainerArgs.ckpt_save_interval", interval, expected)
        saves = self.saves_within(self.max_train_iters or interval)
        if saves and self.pipeline_type == "prefetch" and self.enable_balanced_shuffler:
            # This pipeline is drained for evaluations, and its windows begin anew behind them.
            require(
                self.eval_interval % self.balance_window == 0,
                "TrainerArgs.eval_interval",
                self.eval_interval,
                f"a multiple of balance_window = {self.balance_window}, with checkpoints and prefetch",
            )
        for name, values in (
            ("balance_partitioner", PARTITIONERS),
            ("balance_exchange", sorted(EXCHANGES)),
        ):
            value = getattr(self, name)
            require(value in values, f"TrainerArgs.{name}", value, f"one of {', '.join(values)}")
        if self.balance_cost != FLOPS:
            MeasuredCost.load(Path(self.balance_cost))
        if self.balance_window_max_step_ratio is not None:
            ratio = self.balance_window_max_step_ratio
            require(ratio >= 1, "TrainerArgs.balance_window_max_step_ratio", ratio, "at least 1")
        require(
            self.enable_balanced_shuffler or not self.single_rank_load,
            "TrainerArgs.single_rank_load",
            self.single_rank_load,
            "False without enable_balanced_shuffler, which is what spreads the samples",
        )
        require(
            self.max_tokens_per_micro_batch is not None or not self.small_micro_batches_at_ends,
            "TrainerArgs.small_micro_batches_at_ends",
            self.small_micro_batches_at_ends,
            "False without max_tokens_per_micro_batch",
        )
        if self.balance_tolerance is not None:
            tolerance = self.balance_tolerance
            finite = 0 <= tolerance < float("inf")
            require(finite, "TrainerArgs.balance_tolerance", tolerance, "a finite number of at least 0")

    def saves_within(self, num_steps: int) -> bool:
        """Whether a checkpoint is due within so many steps."""
        return 0 < self.ckpt_save_interval <= num_steps

    @property
    def eval_rows(self) -> int:
        """Rows per rank and step of an evaluation."""
        return self.train_batch_size if self.eval_batch_size is None else self.eval_batch_size

    @property
    def peak_flops(self) -> float | None:
        """What one device computes at best, in FLOP/s."""
        return None if self.peak_tflops is None else self.peak_tflops * 1e12

    @property
    def balance_settings(self) -> dict[str, Any]:
        """What the `balance_*` settings say other than the default, as a shuffler takes it."""
        settings = {
            field.name.removeprefix("balance_"): getattr(self, field.name)
            for field in fields(self)
            if field.name.startswith("balance_") and getattr(self, field.name) != field.default
        }
        if "cost" in settings:
            settings["cost"] = MeasuredCost.load(Path(self.balance_cost))
        return settings

    @property
    def micro_batch_settings(self) -> dict[str, Any]:
        """What the settings of micro-batches say other than the default, as a shuffler takes it."""
        if self.max_tokens_per_micro_batch is None:
            return {}
        settings: dict[str, Any] = {"max_tokens_per_micro_batch": self.max_tokens_per_micro_batch}
        return settings | ({"small_micro_batches_at_ends": True} if self.small_micro_batches_at_ends else {})

    def settings_without_effect(self) -> list[str]:
        """One line for each setting that asks for something that does not happen."""
        lines = []
        if not self.enable_balanced_shuffler:
            lines += [
                f"TrainerArgs.{field.name} = {getattr(self, field.name)!r} has no effect without "
                "enable_balanced_shuffler: samples stay where they are loaded"
                for field in fields(self)
                if field.name.startswith(("batch_shuffler", "balance_"))
                and getattr(self, field.name) != field.default
            ]
        return lines


_OPTIMIZERS = ("adam", "adagrad", "sgd")


@gin.configurable
@dataclass
class OptimizerArgs:
    """The optimizer of dense parameters and embedding tables.

    Attributes:
        optimizer_str: "adam", "adagrad" or "sgd".
        learning_rate: of both.
        adam_beta1, adam_beta2, adam_eps: Adam's.

    Raises:
        ValueError: an unknown optimizer, or a negative learning rate.
    """

    optimizer_str: str
    learning_rate: float
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8

    def __post_init__(self) -> None:
        self.optimizer_str = self.optimizer_str.lower()
        require(
            self.optimizer_str in _OPTIMIZERS,
            "OptimizerArgs.optimizer_str",
            self.optimizer_str,
            f"one of {', '.join(_OPTIMIZERS)}",
        )
        require(self.learning_rate >= 0, "OptimizerArgs.learning_rate", self.learning_rate, "at least 0")


@gin.configurable
@dataclass
class TensorModelParallelArgs:
    """Accepted because files of this field have it; only 1 runs.

    Raises:
        ValueError: `tensor_model_parallel_size` is not 1.
    """

    tensor_model_parallel_size: int = 1

    def __post_init__(self) -> None:
        require(
            self.tensor_model_parallel_size == 1,
            "TensorModelParallelArgs.tensor_model_parallel_size",
            self.tensor_model_parallel_size,
            "1: training here is data-parallel, with model-parallel embedding tables",
        )
