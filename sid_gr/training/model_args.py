"""Gin settings of the SID-GR model."""

from __future__ import annotations

from dataclasses import dataclass, field

import gin

from commons.checks import check_types
from commons.datasets import RandomDistribution, SIDDatasetSpec
from commons.datasets.gin_values import require_setting, require_settings_at_least
from commons.local_paths import expand_paths
from commons.training.network_args import BaseNetworkArgs
from sid_gr.modules import DecoderConfig

RANDOM, FROM_DISK = "sid_random_dataset", "sid_sequence_dataset"

_PATHS = (
    "sequence_features_training_data_path",
    "sequence_features_testing_data_path",
    "item_to_sid_mapping_path",
)
_OPTIONAL_PATHS = ("sequence_features_validation_data_path",)


@gin.configurable(module="sid_gr")
@dataclass
class DatasetArgs:
    """Settings of a dataset of items as semantic IDs.

    Attributes:
        dataset_name: name of the dataset.
        max_history_length: number of newest items that a sample keeps before its candidates, or before its
            target if all items are candidates.
        max_candidate_length: number of newest items that have a loss: 1 for only the last, 0 for all. Each
            candidate has a BOS in front.
        dataset_type_str: "sid_random_dataset" or "sid_sequence_dataset".
        sequence_features_training_data_path, sequence_features_testing_data_path: Parquet files written by
            `commons.datasets.sid_preprocess`.
        sequence_features_validation_data_path: Parquet file that training evaluates on; then only
            `--evaluate` reads the testing file. None means that training evaluates on the testing file.
        item_to_sid_mapping_path: `.pt` file of a tensor `[num_hierarchies, num_items]`, or JSON file of
            `{item: [codes]}`. Reading JSON takes seconds per million items.
        shuffle: whether each epoch has its own order.
        num_hierarchies: number of codes per item.
        codebook_sizes: codebook size of each hierarchy.
        deduplicate_label_across_hierarchy: flag in gin files of other trainers, without effect here:
            `NetworkArgs` decides on shared heads.
        contextual_vocab_sizes: number of ids of each Parquet column that describes the user, by name.
        history_length_dist: lengths of the random dataset; None for uniform from 1 to `max_history_length`.
        num_generated_batches: number of batches of the random dataset, per rank and epoch.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range, or a path is missing.
    """

    dataset_name: str
    max_history_length: int
    dataset_type_str: str
    num_hierarchies: int
    codebook_sizes: list[int]
    max_candidate_length: int = 1
    sequence_features_training_data_path: str | None = None
    sequence_features_testing_data_path: str | None = None
    sequence_features_validation_data_path: str | None = None
    item_to_sid_mapping_path: str | None = None
    shuffle: bool = False
    deduplicate_label_across_hierarchy: bool = False
    contextual_vocab_sizes: dict[str, int] = field(default_factory=dict)
    history_length_dist: RandomDistribution | None = None
    num_generated_batches: int = 100

    def __post_init__(self) -> None:
        check_types(self)
        kinds = (RANDOM, FROM_DISK)
        require_setting(self, self.dataset_type_str in kinds, "dataset_type_str", f"one of {kinds}")
        require_settings_at_least(1, self, "max_history_length", "num_generated_batches")
        require_settings_at_least(0, self, "max_candidate_length")
        sizes = self.codebook_sizes
        expected = f"one size, of at least 1, for each of num_hierarchies = {self.num_hierarchies}"
        are_sizes = len(sizes) == self.num_hierarchies and min(sizes, default=1) >= 1
        require_setting(self, are_sizes, "codebook_sizes", expected)
        if self.dataset_type_str == FROM_DISK:
            for name in _PATHS:
                require_setting(self, bool(getattr(self, name)), name, "a path")
            expand_paths(self, *_PATHS, *_OPTIONAL_PATHS)

    def settings_without_effect(self) -> list[str]:
        """Returns a warning for each setting without effect."""
        random_only = {"history_length_dist": None, "num_generated_batches": 100}
        disk_only = dict.fromkeys((*_PATHS, *_OPTIONAL_PATHS))
        others = disk_only if self.dataset_type_str == RANDOM else random_only
        lines = [
            f"DatasetArgs.{name} has no effect on a {self.dataset_type_str}"
            for name, default in others.items()
            if getattr(self, name) != default
        ]
        if self.deduplicate_label_across_hierarchy:
            lines.append(
                "DatasetArgs.deduplicate_label_across_hierarchy has no effect here: heads are shared by "
                "NetworkArgs.share_lm_head_across_hierarchies"
            )
        return lines

    def spec(self) -> SIDDatasetSpec:
        """Returns the layout of the samples."""
        return SIDDatasetSpec(
            codebook_sizes=tuple(self.codebook_sizes),
            max_history_length=self.max_history_length,
            max_candidate_length=self.max_candidate_length,
            contextual_vocab_sizes=dict(self.contextual_vocab_sizes),
        )


@gin.configurable(module="sid_gr")
@dataclass
class NetworkArgs(BaseNetworkArgs):
    """Settings of the decoder's layers.

    Attributes:
        share_lm_head_across_hierarchies: whether all hierarchies share one head; False gives each its own.
        num_kv_heads: number of key and value heads, which query heads share; −1 means `num_attention_heads`.
        mlp_size: width of the MLP's hidden layer; −1 means four times `hidden_size`.
        gated_mlp: whether a third matrix gates the MLP's hidden layer.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range.
    """

    share_lm_head_across_hierarchies: bool = True
    num_kv_heads: int = -1
    mlp_size: int = -1
    gated_mlp: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, self.is_causal, "is_causal", "True: codes are generated one by one")
        for name in ("num_kv_heads", "mlp_size"):
            value = getattr(self, name)
            require_setting(self, value == -1 or value >= 1, name, "at least 1, or -1")
        is_divisor = self.num_kv_heads == -1 or self.num_attention_heads % self.num_kv_heads == 0
        expected = f"a divisor of num_attention_heads = {self.num_attention_heads}"
        require_setting(self, is_divisor, "num_kv_heads", expected)

    def decoder(self) -> DecoderConfig:
        """Returns the layers' configuration."""
        return DecoderConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            head_dim=self.kv_channels,
            num_kv_heads=self.num_kv_heads,
            mlp_size=self.mlp_size,
            gated_mlp=self.gated_mlp,
            dropout=self.hidden_dropout,
            norm_epsilon=self.norm_epsilon,
        )

    def settings_without_effect(self) -> list[str]:
        """Returns a warning for each setting without effect."""
        lines = super().settings_without_effect()
        if self.kernel_backend.lower() != "pytorch":
            lines.append(self.backend_line("PyTorch", "this model has no kernels of its own"))
        for name in ("recompute_input_layernorm", "recompute_input_silu"):
            if getattr(self, name):
                lines.append(f"NetworkArgs.{name} has no effect here: only HSTU layers recompute")
        for name in ("item_embedding_dim", "contextual_embedding_dim"):
            if getattr(self, name) not in (-1, self.hidden_size):
                lines.append(f"NetworkArgs.{name} has no effect here: embeddings have hidden_size")
        if self.scaling_seqlen != -1:
            lines.append("NetworkArgs.scaling_seqlen has no effect here: attention is a softmax")
        if self.disable_contextual_mask:
            lines.append("NetworkArgs.disable_contextual_mask has no effect here: all tokens are causal")
        return lines
