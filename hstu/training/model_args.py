"""What gin files say about the HSTU models."""

from __future__ import annotations

from dataclasses import dataclass

import gin
import torch

from commons.training.training_args import require, require_at_least
from hstu.models.hstu_config import HSTUConfig, full_sequence_length
from hstu.models.ranking import RankingHeadConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@gin.configurable(module="hstu")
@dataclass
class DatasetArgs:
    """A dataset from disk.

    Attributes:
        dataset_name: "ml-100k", "ml-1m" or "ml-20m".
        max_history_seqlen: the newest items of a sample that are kept, candidates included.
        dataset_path: folder with the prepared files; None for data/`dataset_name`.
        max_num_candidates: the most candidates a sample may have; 0 means that there are none.
        shuffle: whether each epoch has an order of its own.

    Raises:
        ValueError: a value is out of range.
    """

    dataset_name: str
    max_history_seqlen: int
    dataset_path: str | None = None
    max_num_candidates: int = 0
    shuffle: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, "DatasetArgs.max_history_seqlen", self.max_history_seqlen)
        require_at_least(0, "DatasetArgs.max_num_candidates", self.max_num_candidates)


@gin.configurable(module="hstu")
@dataclass
class NetworkArgs:
    """The HSTU layers.

    Attributes:
        num_layers: layers.
        hidden_size: width of a token.
        num_attention_heads: heads.
        kv_channels: width of one head.
        hidden_dropout: probability, behind each layer.
        norm_epsilon: of all layer norms.
        is_causal: whether the history is seen in order.
        dtype_str: "bfloat16", "float16" or "float32". Gradients in float16 are not scaled, because fused
            tables update within backward; small ones underflow.
        kernel_backend: accepted; attention runs in PyTorch.
        target_group_size: candidates that see each other; only 1 runs.
        num_position_buckets: positions with an embedding of their own.
        recompute_input_layernorm, recompute_input_silu: accepted; backward always recomputes the scores.
        item_embedding_dim, contextual_embedding_dim: widths of embeddings; −1 for `hidden_size`.
        scaling_seqlen: what attention weights are divided by; −1 for the configured full length.
        disable_contextual_mask: whether contextual tokens are causal too.

    Raises:
        ValueError: a value is out of range.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    kv_channels: int
    hidden_dropout: float = 0.2
    norm_epsilon: float = 1e-5
    is_causal: bool = True
    dtype_str: str = "bfloat16"
    kernel_backend: str = "pytorch"
    target_group_size: int = 1
    num_position_buckets: int = 8192
    recompute_input_layernorm: bool = False
    recompute_input_silu: bool = False
    item_embedding_dim: int = -1
    contextual_embedding_dim: int = -1
    scaling_seqlen: int = -1
    disable_contextual_mask: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "kv_channels",
            "num_position_buckets",
        ):
            require_at_least(1, f"NetworkArgs.{name}", getattr(self, name))
        for name in ("item_embedding_dim", "contextual_embedding_dim", "scaling_seqlen"):
            value = getattr(self, name)
            require(value == -1 or value >= 1, f"NetworkArgs.{name}", value, "at least 1, or -1")
        require(0 <= self.hidden_dropout < 1, "NetworkArgs.hidden_dropout", self.hidden_dropout, "0 to 1")
        require(self.dtype_str in _DTYPES, "NetworkArgs.dtype_str", self.dtype_str, f"one of {list(_DTYPES)}")
        require(self.target_group_size == 1, "NetworkArgs.target_group_size", self.target_group_size, "1")

    def config(self, num_contextual: int, max_items: int) -> HSTUConfig:
        """The model's configuration, for samples of at most these contextual tokens and items."""
        scaling_seqlen = self.scaling_seqlen
        if scaling_seqlen == -1:
            scaling_seqlen = full_sequence_length(num_contextual, max_items, 0)
        return HSTUConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            head_dim=self.kv_channels,
            scaling_seqlen=scaling_seqlen,
            item_embedding_dim=self.item_embedding_dim,
            contextual_embedding_dim=self.contextual_embedding_dim,
            hidden_dropout=self.hidden_dropout,
            norm_epsilon=self.norm_epsilon,
            is_causal=self.is_causal,
            dtype=_DTYPES[self.dtype_str],
            num_position_buckets=self.num_position_buckets,
            disable_contextual_mask=self.disable_contextual_mask,
        )

    def settings_without_effect(self) -> list[str]:
        """One line for each setting that asks for something that does not happen."""
        lines = []
        if self.kernel_backend.lower() != "pytorch":
            lines.append(
                f'NetworkArgs.kernel_backend = "{self.kernel_backend}" is not available here: '
                "attention runs in PyTorch"
            )
        for name in ("recompute_input_layernorm", "recompute_input_silu"):
            if getattr(self, name):
                lines.append(f"NetworkArgs.{name} has no effect here: the layer's inputs are kept")
        if self.dtype_str == "float16":
            lines.append(
                'NetworkArgs.dtype_str = "float16" trains without loss scaling, so small gradients are lost: '
                '"bfloat16" has the range of float32'
            )
        return lines


@gin.configurable(module="hstu")
@dataclass
class RankingArgs:
    """The head that predicts actions.

    Attributes:
        prediction_head_arch: output widths of its linear layers.
        prediction_head_act_type: "relu" or "gelu".
        prediction_head_bias: whether they have a bias.
        num_tasks: binary tasks, one per bit of the action; 1 for classes.
        eval_metrics: of them "AUC" is available.

    Raises:
        ValueError: a value is out of range.
    """

    prediction_head_arch: list[int]
    prediction_head_act_type: str = "relu"
    prediction_head_bias: bool = True
    num_tasks: int = 1
    eval_metrics: tuple[str, ...] = ("AUC",)

    def __post_init__(self) -> None:
        arch = self.prediction_head_arch
        require(
            len(arch) > 0 and min(arch) >= 1, "RankingArgs.prediction_head_arch", arch, "widths of at least 1"
        )
        require(self.num_tasks >= 1, "RankingArgs.num_tasks", self.num_tasks, "at least 1")
        require(
            self.num_tasks in (1, arch[-1]),
            "RankingArgs.num_tasks",
            self.num_tasks,
            f"1, or the head's last width, {arch[-1]}",
        )
        act = self.prediction_head_act_type
        require(act in ("relu", "gelu"), "RankingArgs.prediction_head_act_type", act, '"relu" or "gelu"')
        metrics = tuple(self.eval_metrics)
        require(metrics == ("AUC",), "RankingArgs.eval_metrics", metrics, '("AUC",)')

    def config(self) -> RankingHeadConfig:
        """The head's configuration."""
        return RankingHeadConfig(
            prediction_head_arch=tuple(self.prediction_head_arch),
            prediction_head_act_type=self.prediction_head_act_type,
            prediction_head_bias=self.prediction_head_bias,
            num_tasks=self.num_tasks,
        )
