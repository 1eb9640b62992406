"""Embedding tables for ids of any size, by themselves and sharded by rows."""

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

from commons.unbounded_ids.id_mix import MARK_OF_FREE_ROW, fresh_rows, unmixed
from commons.unbounded_ids.id_placement import place_ids
from commons.unbounded_ids.id_rows import IdRows, id_rows


class UnboundedEmbeddingCollection(ManagedCollisionEmbeddingCollection):
    """A TorchRec `EmbeddingCollection` whose ids are any int64 but the smallest, and which evicts.

    `num_embeddings` of a table is its capacity. In training a new id gets a row in the step that brings it,
    free or of an id that is evicted; its embedding begins as `fresh_rows` has it, its optimiser state as
    zeros. Evaluation changes nothing; an id without a row then has the embedding of its rank's shared row.
    It has to be sharded, by `shard_model`: by itself it does not reset rows. It is called once a step: a
    second call might evict ids of the first, whose backward then fails. All ranks are to be seeded alike when
    it is made, because fresh rows are a function of the seed.

    Args:
        tables: of one width.
        eviction: by table name, "lru" or "lfu".
        device: of the embeddings.

    Raises:
        ValueError: another eviction.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], eviction: Mapping[str, str], device: torch.device | None
    ) -> None:
        rows = {
            table.name: id_rows(table.name, table.num_embeddings, eviction[table.name]) for table in tables
        }
        super().__init__(
            EmbeddingCollection(tables=list(tables), device=device), ManagedCollisionCollection(rows, tables)
        )
        # Seeded as the tables are, which all ranks initialise alike.
        seed = torch.initial_seed()
        self.salts = {table.name: seed ^ zlib.crc32(table.name.encode()) << 32 for table in tables}

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """By feature name, as of an `EmbeddingCollection`."""
        embeddings, _ = super().forward(features)
        return embeddings

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Of the tables."""
        return self._embedding_module.embedding_configs()


class ShardedUnboundedEmbeddingCollection(ShardedManagedCollisionEmbeddingCollection):
    """One rank's part of an `UnboundedEmbeddingCollection`. Its forward is that of an `EmbeddingCollection`.

    A step costs, beside what an ordinary table sharded by rows does, for each table:

    - no more collectives: ids are mixed elementwise before the one all-to-all;
    - in training a sort of the step's ids that the rank owns, and, if any is new, two sorts of the rank's
      rows (their ages or counts, then their ids); in evaluation a binary search for each id;
    - on a GPU about ten host-device synchronisations in training and three in evaluation, for the numbers of
      distinct ids, of known and new ones, and of those let in.
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
        """The embeddings, to be waited for."""
        embeddings, _ = super().output_dist(ctx, output)
        return embeddings

    def held_ids(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids that have a row on this rank, int64 `[ids]`, and these rows, counted from the rank's first."""
        values = self._rows_of(table).ids_of_rows()
        rows = (values != MARK_OF_FREE_ROW).nonzero().squeeze(1)
        return unmixed(values[rows]), rows

    def has_table(self, table: str) -> bool:
        """Whether it is one of these."""
        return table in self._configs

    @torch.no_grad()
    def place_loaded_ids(self) -> None:
        """Brings what was loaded from a checkpoint of another number of ranks to the ranks that own the ids.

        For embeddings and their optimiser's state loaded already; does nothing if the ranks are as many. Ids
        that more of one rank own than it has rows for are evicted, the others keep all. Collective.
        """
        for table in self._configs:
            rows = self._rows_of(table)
            if rows.is_misplaced:
                weights, *states = self._states(table)
                place_ids(rows, [weights, *states], self._env.process_group)
                self._reset(table, torch.tensor([len(weights) - 1], device=weights.device))

    def _states(self, table: str) -> list[torch.Tensor]:
        """This rank's `[rows, ...]` of embeddings, then of each state that the optimiser has of them."""
        kernel, index = self._kernels[table]
        states = kernel.split_optimizer_states()  # an empty list, not one of empty lists, if there are none
        return [kernel.split_embedding_weights()[index].detach(), *(states[index] if states else [])]

    def _reset(self, table: str, rows: torch.Tensor) -> None:
        """Makes rows of this rank those of fresh ids."""
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
        """Makes rows that changed hands those of fresh ids.

        TorchRec would draw them from the rank's random numbers, of which dropout takes as many as the samples
        placed there need; and resets the optimiser's state of one optimiser alone, on a GPU alone.
        """
        for table, rows in evictions_per_table.items():
            if rows is not None and len(rows):
                self._reset(table, rows)


class UnboundedEmbeddingCollectionSharder(ManagedCollisionEmbeddingCollectionSharder):
    """What `DistributedModelParallel` shards an `UnboundedEmbeddingCollection` with."""

    def shard(
        self,
        module: UnboundedEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedUnboundedEmbeddingCollection:
        """This rank's part.

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
        """What it shards."""
        return UnboundedEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """What that becomes."""
        return ShardedUnboundedEmbeddingCollection


def _check_rows(config: EmbeddingConfig, num_ranks: int) -> None:
    """Each rank but the last has as many rows as the next whole number; the last has what is left."""
    of_last = config.num_embeddings - (num_ranks - 1) * -(-config.num_embeddings // num_ranks)
    if of_last < 2:
        raise ValueError(
            f"table {config.name!r} has {config.num_embeddings} rows for {num_ranks} ranks, which leaves "
            f"{max(of_last, 0)} on the last; expected at least 2, one of which is for ids without a row: set "
            f"item_vocab_size_or_capacity to a multiple of the ranks, {2 * num_ranks} or more"
        )
