"""How the embedding tables are described in gin files."""

from __future__ import annotations

from dataclasses import dataclass

import gin

_SHARDING_TYPES = ("data_parallel", "model_parallel")
_EVICT_STRATEGIES = ("lru", "lfu")


@gin.configurable
@dataclass
class EmbeddingArgs:
    """One embedding table.

    Attributes:
        feature_names: features that look up in the table.
        table_name: the table's name.
        item_vocab_size_or_capacity: rows of the table; ids are 0 to this, exclusive.
        sharding_type: "data_parallel" for a small table, a copy of which every rank has, or
            "model_parallel" for a large one, whose rows are divided among the ranks.

    Raises:
        ValueError: a value is out of range.
    """

    feature_names: list[str]
    table_name: str
    item_vocab_size_or_capacity: int
    sharding_type: str

    def __post_init__(self) -> None:
        # The class's own name: gin files bind EmbeddingArgs and DynamicEmbeddingArgs separately.
        name = type(self).__name__
        if not self.feature_names:
            raise ValueError(f"{name}.feature_names = {self.feature_names}: expected at least one feature")
        if self.item_vocab_size_or_capacity < 1:
            raise ValueError(
                f"{name}.item_vocab_size_or_capacity = {self.item_vocab_size_or_capacity}: "
                "expected at least 1"
            )
        if self.sharding_type not in _SHARDING_TYPES:
            raise ValueError(
                f"{name}.sharding_type = {self.sharding_type!r}: expected one of {', '.join(_SHARDING_TYPES)}"
            )


@gin.configurable
@dataclass
class DynamicEmbeddingArgs(EmbeddingArgs):
    """One embedding table for ids of any size, of which it has rows for a limited number at a time.

    The options for how much of it GPU memory holds have no effect, because it holds all,
    and neither has the one for how ids are divided among the ranks, because a hash divides them.

    Attributes:
        item_vocab_size_or_capacity: rows of the table over all ranks; on each rank one of them is for ids
            without a row of their own. Ids are any int64 but the smallest.
        sharding_type: "model_parallel", which is all that a dynamic table can be.
        item_vocab_gpu_capacity_ratio: share of the rows that GPU memory holds; here all.
        item_vocab_gpu_capacity: number of rows that GPU memory holds; here all.
        global_hbm_for_values: bytes of GPU memory over all ranks for the rows; here as many as they need.
        evict_strategy: whose rows new ids get once no row is free: those of the ids that were trained on
            least recently ("lru") or least frequently ("lfu").
        caching: whether GPU memory is a cache of rows that the host has too; here it is not.
        dist_type: how ids are divided among the ranks; here by a hash.

    Raises:
        ValueError: a value is out of range.
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
        if self.sharding_type != "model_parallel":
            raise ValueError(
                f"DynamicEmbeddingArgs.sharding_type = {self.sharding_type!r}: expected model_parallel"
            )
        ratio = self.item_vocab_gpu_capacity_ratio
        if ratio is not None and not 0 <= ratio <= 1:
            raise ValueError(f"DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio = {ratio}: expected 0 to 1")
        for name in ("item_vocab_gpu_capacity", "global_hbm_for_values"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"DynamicEmbeddingArgs.{name} = {value}: expected at least 0")
        if self.evict_strategy not in _EVICT_STRATEGIES:
            raise ValueError(
                f"DynamicEmbeddingArgs.evict_strategy = {self.evict_strategy!r}: "
                f"expected one of {', '.join(_EVICT_STRATEGIES)}"
            )

    def settings_without_effect(self) -> list[str]:
        """Those that ask for something else than what runs, as in "caching = True"."""
        ratio, capacity = self.item_vocab_gpu_capacity_ratio, self.item_vocab_gpu_capacity
        ignored = {
            "item_vocab_gpu_capacity_ratio": ratio is not None and ratio < 1,
            "item_vocab_gpu_capacity": capacity is not None and capacity < self.item_vocab_size_or_capacity,
            "global_hbm_for_values": self.global_hbm_for_values is not None,
            "caching": self.caching,
            "dist_type": self.dist_type is not None,
        }
        return [f"{name} = {getattr(self, name)!r}" for name, is_ignored in ignored.items() if is_ignored]
