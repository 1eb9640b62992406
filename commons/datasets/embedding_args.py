"""Gin settings of embedding tables."""

from __future__ import annotations

from dataclasses import dataclass

import gin

from ..checks import check_types
from .gin_values import require_setting, require_settings_at_least

_SHARDING_TYPES = ("data_parallel", "model_parallel")
_EVICT_STRATEGIES = ("lru", "lfu")


@gin.configurable
@dataclass
class EmbeddingArgs:
    """One embedding table.

    Attributes:
        feature_names: names of the features that look up ids in the table.
        table_name: name of the table.
        item_vocab_size_or_capacity: number of rows of the table. Ids are at least 0 and below it.
        sharding_type: "data_parallel" puts a copy on every rank, for small tables. "model_parallel" divides
            the rows among the ranks, for large tables.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range.
    """

    feature_names: list[str]
    table_name: str
    item_vocab_size_or_capacity: int
    sharding_type: str

    def __post_init__(self) -> None:
        check_types(self)
        require_setting(self, bool(self.feature_names), "feature_names", "at least one feature")
        require_settings_at_least(1, self, "item_vocab_size_or_capacity")
        known = f"one of {', '.join(_SHARDING_TYPES)}"
        require_setting(self, self.sharding_type in _SHARDING_TYPES, "sharding_type", known)


@gin.configurable
@dataclass
class DynamicEmbeddingArgs(EmbeddingArgs):
    """One embedding table for ids of any size, which has rows for a limited number of ids at a time.

    GPU memory holds the whole table, and a hash divides the ids among the ranks. So the settings for partial
    GPU residence and for the division have no effect.

    Attributes:
        item_vocab_size_or_capacity: number of rows over all ranks. Ids without their own row share one row
            per rank. Ids are any int64 except the smallest.
        sharding_type: "model_parallel", the only type for dynamic tables.
        item_vocab_gpu_capacity_ratio: share of the rows in GPU memory; no effect.
        item_vocab_gpu_capacity: number of rows in GPU memory; no effect.
        global_hbm_for_values: bytes of GPU memory for the rows over all ranks; no effect.
        evict_strategy: choice of the ids that lose their rows to new ids once no row is free: the least
            recently ("lru") or least frequently ("lfu") trained ids.
        caching: whether GPU memory caches rows that the host holds; no effect.
        dist_type: division of ids among the ranks; no effect.
    """

    sharding_type: str = "model_parallel"
    item_vocab_gpu_capacity_ratio: float | None = None
    item_vocab_gpu_capacity: int | None = None
    global_hbm_for_values: int | None = None
    evict_strategy: str = "lru"
    caching: bool = False
    dist_type: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_sharded, ratio = self.sharding_type == "model_parallel", self.item_vocab_gpu_capacity_ratio
        require_setting(self, is_sharded, "sharding_type", "model_parallel")
        require_setting(self, 0 <= (ratio or 0) <= 1, "item_vocab_gpu_capacity_ratio", "0 to 1")
        require_settings_at_least(0, self, "item_vocab_gpu_capacity", "global_hbm_for_values")
        known = f"one of {', '.join(_EVICT_STRATEGIES)}"
        require_setting(self, self.evict_strategy in _EVICT_STRATEGIES, "evict_strategy", known)

    def settings_without_effect(self) -> list[str]:
        """Returns the settings that request something other than what runs, such as "caching = True"."""
        ratio, capacity = self.item_vocab_gpu_capacity_ratio, self.item_vocab_gpu_capacity
        ignored = {
            "item_vocab_gpu_capacity_ratio": ratio is not None and ratio < 1,
            "item_vocab_gpu_capacity": capacity is not None and capacity < self.item_vocab_size_or_capacity,
            "global_hbm_for_values": self.global_hbm_for_values is not None,
            "caching": self.caching,
            "dist_type": self.dist_type is not None,
        }
        return [f"{name} = {getattr(self, name)!r}" for name, is_ignored in ignored.items() if is_ignored]
