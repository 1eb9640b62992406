"""Embedding collections for unbounded ids, unsharded and sharded by rows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from .id_mix import MARK_OF_FREE_ROW, fresh_rows, unmixed
from .id_placement import place_ids
from .id_rows import IdRows, id_rows


class UnboundedEmbeddingCollection(ManagedCollisionEmbeddingCollection):
    """A TorchRec `EmbeddingCollection` that evicts ids. An id is any int64 except the smallest.

    A table's `num_embeddings` is its capacity. In training, a new id gets a row in its first step: a free row
    or the row of an evicted id. Its embedding starts from `fresh_rows`, and its optimizer state from zeros.
    Evaluation changes nothing. An id without a row uses the shared row of the rank that owns it.

    Shard the collection with `shard_model`, because only the sharded module resets rows. Call it once per
    step: a second call might evict ids of the first call, whose backward pass would then fail. Seed all ranks
    alike before construction, because fresh rows depend on the seed.

    Args:
        tables: tables of one width.
        eviction: policy of each table by name, "lru" or "lfu".
        device: device of the embeddings and of the rows' ids. On the meta device, they take no memory until
            `shard_model` creates each rank's rows.

    Raises:
        ValueError: an eviction policy is unknown.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], eviction: Mapping[str, str], device: torch.device | None
    ) -> None:
        rows = {
            table.name: id_rows(table.name, table.num_embeddings, eviction[table.name], device)
            for table in tables
        }
        super().__init__(
            EmbeddingCollection(tables=list(tables), device=device), ManagedCollisionCollection(rows, tables)
        )
        # The seed that all ranks initialize the tables with.
        seed = torch.initial_seed()
        self.salts = {table.name: seed ^ zlib.crc32(table.name.encode()) << 32 for table in tables}

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns embeddings by feature name, like an `EmbeddingCollection`."""
        embeddings, _ = super().forward(features)
        return embeddings

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the tables' configurations."""
        return self._embedding_module.embedding_configs()


class ShardedUnboundedEmbeddingCollection(ShardedManagedCollisionEmbeddingCollection):
    """One rank's part of an `UnboundedEmbeddingCollection`; `forward` returns only the embeddings.

    Compared with an ordinary table sharded by rows, each table costs per step:

    - no additional collective: ids are mixed elementwise before the one all-to-all;
    - in training, one sort of the step's ids that the rank owns and, if any of them is new, two sorts of the
      rank's rows, by age or count and by id; in evaluation, one binary search per id;
    - on a GPU, about ten host-device synchronizations in training and three in evaluation, for the numbers of
      distinct, known, new, and admitted ids.
    """

    def __init__(
        self,
        module: UnboundedEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        ec_sharder: EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, ec_sharder, mc_sharder, env, device)
        self._salts = module.salts
        self._configs = {config.name: config for config in module.embedding_configs()}
        self._kernels: dict[str, tuple[Any, int]] = {
            table.name: (kernel._emb_module, index)
            for lookup in self._embedding_module._lookups
            for kernel in lookup._emb_modules
            for index, table in enumerate(kernel._config.embedding_tables)
        }

    def output_dist(self, ctx: Any, output: list[torch.Tensor]) -> Any:
        """Returns an awaitable of the embeddings."""
        embeddings, _ = super().output_dist(ctx, output)
        return embeddings

    def held_ids(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids with a row on this rank, int64 `[ids]`, and the indices of their local rows."""
        values = self._rows_of(table).ids_of_rows()
        rows = (values != MARK_OF_FREE_ROW).nonzero().squeeze(1)
        return unmixed(values[rows]), rows

    def has_table(self, table: str) -> bool:
        """Returns whether `table` belongs to this collection."""
        return table in self._configs

    @torch.no_grad()
    def place_loaded_ids(self) -> None:
        """Moves rows loaded from a checkpoint of another number of ranks to the ranks that own their ids.

        Collective. Call it after loading embeddings and optimizer state. It does nothing if the number of
        ranks is the same. If a rank owns more ids than it has rows, the surplus is evicted.
        """
        for table in self._configs:
            rows = self._rows_of(table)
            if rows.is_misplaced:
                weights, *states = self._states(table)
                place_ids(rows, [weights, *states], self._env.process_group)
                self._reset(table, torch.tensor([len(weights) - 1], device=weights.device))

    def _states(self, table: str) -> list[torch.Tensor]:
        """Returns this rank's embeddings, then each of its optimizer states, `[rows, ...]` each."""
        kernel, index = self._kernels[table]
        states = kernel.split_optimizer_states()  # without states, an empty list, not a list of empty lists
        return [kernel.split_embedding_weights()[index].detach(), *(states[index] if states else [])]

    def _reset(self, table: str, rows: torch.Tensor) -> None:
        """Resets rows of this rank to the initial values of the ids that they now hold."""
        config = self._configs[table]
        values = self._rows_of(table).ids_of_rows()[rows]
        weights, *states = self._states(table)
        bound = config.get_weight_init_max()
        weights[rows] = fresh_rows(values, config.embedding_dim, bound, self._salts[table]).to(weights.dtype)
        for state in states:
            state[rows] = 0

    def _rows_of(self, table: str) -> IdRows:
        return self._managed_collision_collection._managed_collision_modules[table]

    @torch.no_grad()
    def _evict(self, evictions_per_table: dict[str, torch.Tensor | None]) -> None:
        """Resets the rows of evicted ids to the initial values of the new ids.

        TorchRec would draw these values from the rank's random state, which dropout makes depend on the
        samples placed there. It would also reset only one optimizer state, and only on GPUs.
        """
        for table, rows in evictions_per_table.items():
            if rows is not None and len(rows):
                self._reset(table, rows)


class UnboundedEmbeddingCollectionSharder(ManagedCollisionEmbeddingCollectionSharder):
    """The sharder of `UnboundedEmbeddingCollection` for `DistributedModelParallel`."""

    def shard(
        self,
        module: UnboundedEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedUnboundedEmbeddingCollection:
        """Returns this rank's part of a collection.

        Raises:
            ValueError: a rank would have no row for ids.
        """
        for config in module.embedding_configs():
            _check_rows(config, env.world_size)
        return ShardedUnboundedEmbeddingCollection(
            module, params, self._e_sharder, self._mc_sharder, env, device or torch.device("cuda")
        )

    @property
    def module_type(self) -> type[nn.Module]:
        """Type of the unsharded module."""
        return UnboundedEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """Type of the sharded module."""
        return ShardedUnboundedEmbeddingCollection


def _check_rows(config: EmbeddingConfig, num_ranks: int) -> None:
    """Checks that enough rows are left for the last rank. Other ranks have the average, rounded up."""
    last_rows = config.num_embeddings - (num_ranks - 1) * -(-config.num_embeddings // num_ranks)
    if last_rows < 2:
        raise ValueError(
            f"table {config.name!r} has {config.num_embeddings} rows for {num_ranks} ranks, which leaves "
            f"{max(last_rows, 0)} on the last; expected at least 2, one of them for ids without a row: set "
            f"item_vocab_size_or_capacity to a multiple of the ranks, {2 * num_ranks} or more"
        )
