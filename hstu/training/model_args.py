"""Gin settings of the HSTU models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import gin

from commons.checks import check_types
from commons.datasets.gin_values import require_setting, require_settings_at_least
from commons.local_paths import expand_paths
from commons.training.metrics import parsed_names
from commons.training.network_args import BaseNetworkArgs
from hstu.models.retrieval import RetrievalConfig
from hstu.modules.attention_backend import BACKENDS, RunningBackend
from hstu.modules.hstu_config import HSTUConfig, full_sequence_length
from hstu.modules.prediction_head import RankingHeadConfig


@gin.configurable(module="hstu")
@dataclass
class DatasetArgs:
    """Settings of a dataset on disk.

    Attributes:
        dataset_name: "ml-100k", "ml-1m", "ml-20m", "kuairand-pure", "kuairand-1k", "kuairand-27k", or a name
            that a module of your own registers.
        max_history_seqlen: number of newest items that a sample keeps, candidates included.
        dataset_path: folder with the prepared files; None for data/`dataset_name`.
        max_num_candidates: maximum number of candidates per sample; 0 for none.
        shuffle: whether each epoch has its own order.
        num_held_out: number of each user's newest items that retrieval does not train on. With 1, the last
            item is evaluated. With 2, training evaluates on the second-last item, and `--evaluate` on the
            last. None means 1. Ranking takes only None, and holds out a fifth.
        use_windows: whether a user whose history exceeds `max_history_seqlen` has several training samples,
            which cover all of it. Otherwise, only the newest events are trained on.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range.
    """

    dataset_name: str
    max_history_seqlen: int
    dataset_path: str | None = None
    max_num_candidates: int = 0
    shuffle: bool = False
    num_held_out: int | None = None
    use_windows: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        expand_paths(self, "dataset_path")
        is_known = self.num_held_out in (None, 1, 2)
        require_setting(self, is_known, "num_held_out", "1, 2 for one to validate and one to test, or None")
        require_settings_at_least(2 if self.use_windows else 1, self, "max_history_seqlen")
        require_settings_at_least(0, self, "max_num_candidates")
        has_labels = not (self.use_windows and self.max_num_candidates)
        expected = "0 with use_windows, because only candidates have labels"
        require_setting(self, has_labels, "max_num_candidates", expected)

    def source_options(self, for_retrieval: bool) -> dict[str, Any]:
        """Returns the arguments of `UserSequenceSource`, except for the sequences and the split."""
        return {
            "max_history_seqlen": self.max_history_seqlen,
            "max_num_candidates": self.max_num_candidates,
            "num_held_out": (self.num_held_out or 1) if for_retrieval else None,
            # Retrieval predicts no sample's first item, so its windows overlap by one.
            "window_step": self.max_history_seqlen - int(for_retrieval) if self.use_windows else None,
        }


@gin.configurable(module="hstu")
@dataclass
class NetworkArgs(BaseNetworkArgs):
    """Settings of the HSTU layers, including all of `BaseNetworkArgs`.

    Attributes:
        embedding_backend: name in gin files of other trainers, without effect here: tables are TorchRec's.
    """

    embedding_backend: str | None = None

    def settings_without_effect(self) -> list[str]:
        """Returns one warning for each setting without effect."""
        lines = super().settings_without_effect()
        if self.embedding_backend is not None:
            lines.append("NetworkArgs.embedding_backend has no effect here: tables are TorchRec's")
        return lines

    def backend_lines(self, backend: RunningBackend) -> list[str]:
        """Returns one warning if another backend than `kernel_backend` runs."""
        return [self.backend_line(BACKENDS[backend.name], backend.reason)] if backend.reason else []

    def config(self, num_contextual: int, max_items: int, kernel_backend: str) -> HSTUConfig:
        """Returns the model's configuration, for at most this many contextual tokens and items per sample."""
        settings: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(HSTUConfig) if field.name != "dtype"
        }
        if self.scaling_seqlen == -1:
            settings["scaling_seqlen"] = full_sequence_length(num_contextual, max_items, 0)
        return HSTUConfig(**settings | {"dtype": self.dtype, "kernel_backend": kernel_backend})


@gin.configurable(module="hstu")
@dataclass
class RankingArgs:
    """Settings of the head that predicts actions.

    Attributes:
        prediction_head_arch: output widths of the head's linear layers.
        prediction_head_act_type: "relu" or "gelu".
        prediction_head_bias: whether the linear layers have a bias.
        num_tasks: number of binary tasks, one per bit of the action; 1 for classes.
        eval_metrics: names of metrics. Only "AUC" is supported, in upper or lower case.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range.
    """

    prediction_head_arch: list[int]
    prediction_head_act_type: str = "relu"
    prediction_head_bias: bool = True
    num_tasks: int = 1
    eval_metrics: tuple[str, ...] = ("AUC",)

    def __post_init__(self) -> None:
        check_types(self)
        arch, has_act = self.prediction_head_arch, self.prediction_head_act_type in ("relu", "gelu")
        is_arch = len(arch) > 0 and min(arch) >= 1
        require_setting(self, is_arch, "prediction_head_arch", "widths of at least 1")
        require_settings_at_least(1, self, "num_tasks")
        expected = f"1, or the head's last width, {arch[-1]}"
        require_setting(self, self.num_tasks in (1, arch[-1]), "num_tasks", expected)
        require_setting(self, has_act, "prediction_head_act_type", '"relu" or "gelu"')
        is_auc = [name.upper() for name in self.eval_metrics] == ["AUC"]
        require_setting(self, is_auc, "eval_metrics", '("AUC",)')

    def config(self) -> RankingHeadConfig:
        """Returns the head's configuration."""
        return RankingHeadConfig(
            prediction_head_arch=tuple(self.prediction_head_arch),
            prediction_head_act_type=self.prediction_head_act_type,
            prediction_head_bias=self.prediction_head_bias,
            num_tasks=self.num_tasks,
        )


@gin.configurable(module="hstu")
@dataclass
class RetrievalArgs:
    """Settings for training and evaluating retrieval of the next item.

    Attributes:
        num_negatives: number of negatives drawn for each sample and epoch.
        temperature: divisor of scores, which are products of unit vectors.
        l2_norm_eps: lower bound of the norm that a vector is divided by.
        eval_metrics: names of metrics, "HR@k", "Recall@k", or "NDCG@k", over a ranking of all items.
        use_actions: whether a token for the user's action follows each item.
        use_contextual_features: whether tokens for the user's features precede the items.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range, or a metric is unknown.
    """

    num_negatives: int
    temperature: float = 0.05
    l2_norm_eps: float = 1e-6
    eval_metrics: tuple[str, ...] = ("HR@10", "NDCG@10")
    use_actions: bool = True
    use_contextual_features: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        require_settings_at_least(1, self, "num_negatives")
        for name in ("temperature", "l2_norm_eps"):
            is_scale = 0 < getattr(self, name) < float("inf")
            require_setting(self, is_scale, name, "a finite number above 0")
        parsed_names(self.eval_metrics, "RetrievalArgs.eval_metrics")

    def config(self) -> RetrievalConfig:
        """Returns the model's part of the settings."""
        return RetrievalConfig(temperature=self.temperature, l2_norm_eps=self.l2_norm_eps)
