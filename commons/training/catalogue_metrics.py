"""HitRate, Recall, and NDCG of rankings of all items, whose embeddings are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torchrec.distributed.types import ShardedModule

from ..unbounded_ids import NO_ID, ShardedUnboundedEmbeddingCollection
from .metrics import EvaluationMetrics, RetrievalMetrics, parsed_names

# Numbers of queries, over all ranks, and of table rows that are scored together: 64 MiB of scores.
QUERIES_PER_CHUNK = 512
ROWS_PER_BLOCK = 1 << 15

# Items with rows on this rank: ids and row indices, both int64 `[items]`, and the rows, `[any, dim]`.
_Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CatalogueMetrics(EvaluationMetrics):
    """Ranks all items of a catalog for each query, by the dot product of vectors of length 1.

    Every rank scores the queries of all ranks against its own rows of the item table. Each query's own rank
    then merges the best items of all ranks. Items with equal scores are in no particular order. In a table of
    unbounded ids, items without a row are never found.

    Args:
        names: names that `parsed_names` accepts.
        setting: name of the setting that contains the names, for errors.
        table: name of the item table, of an `EmbeddingCollection` sharded by rows, or of unbounded ids.
        catalogue: `[items]` ids of the items to rank, ascending.
        l2_norm_eps: smallest length that an embedding is divided by.
        device: device of the outputs.

    Raises:
        ValueError: a name is unknown.
    """

    def __init__(
        self,
        names: Sequence[str],
        setting: str,
        table: str,
        catalogue: np.ndarray,
        l2_norm_eps: float,
        device: torch.device,
    ) -> None:
        self._k = max((k for _, k in parsed_names(names, setting)), default=1)
        self._gains = RetrievalMetrics(names, self._k, device)
        self._table = table
        self._catalogue = torch.from_numpy(catalogue)
        self._l2_norm_eps = l2_norm_eps
        self._device = device
        self._model: torch.nn.Module | None = None
        self._queries: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []

    def bind(self, model: torch.nn.Module) -> None:
        """Takes the sharded model, whose table `compute` reads."""
        self._model = model

    def update(self, output: Any) -> None:
        """Adds float32 `queries` `[queries, dim]` of length 1, and the right items `targets` `[queries]`."""
        self._queries.append(output.queries)
        self._targets.append(output.targets)

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Returns each metric's mean by its given name, or NaN if no rank had a query. Collective.

        Ranks may have different numbers of queries, or none. Gathers `QUERIES_PER_CHUNK` queries at a time,
        with three collectives per chunk, and scores them against blocks of `ROWS_PER_BLOCK` rows.

        Raises:
            RuntimeError: no model was bound.
            ValueError: the model has no sharded table of this name.
        """
        dim, shards = self._held_items()
        queries = torch.cat([torch.empty(0, dim, device=self._device), *self._queries])
        targets = torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *self._targets])
        self._queries, self._targets = [], []
        most = torch.tensor(len(queries), device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        rows = max(QUERIES_PER_CHUNK // dist.get_world_size(), 1)
        for start in range(0, int(most), rows):
            chunk = queries[start : start + rows]
            items = self._best_of_all_ranks(chunk, min(rows, int(most) - start), shards)
            self._gains.update_rankings(items, targets[start : start + rows])
        return self._gains.compute()

    def _best_of_all_ranks(self, queries: torch.Tensor, rows: int, shards: list[_Shard]) -> torch.Tensor:
        """Returns the best items for `queries` `[at most rows, dim]`: int64 `[queries, k]`, best first.

        Every rank pads its queries to `rows`.
        """
        ranks = dist.get_world_size()
        padded = functional.pad(queries, (0, 0, 0, rows - len(queries)))
        gathered = padded.new_empty(ranks * rows, padded.shape[1])
        dist.all_gather_into_tensor(gathered, padded)
        merged = []
        for best_here in self._best_here(gathered, shards):
            best_everywhere = torch.empty_like(best_here)
            dist.all_to_all_single(best_everywhere, best_here)
            # From [rank, query, k] to [query, rank × k].
            merged.append(best_everywhere.view(ranks, rows, -1).transpose(0, 1).flatten(1)[: len(queries)])
        scores, items = merged
        return items.gather(1, scores.topk(self._k, dim=1).indices)

    def _best_here(self, queries: torch.Tensor, shards: list[_Shard]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores and ids of this rank's best items, `[queries, k]`, padded with −∞ and `NO_ID`."""
        scores = queries.new_full((len(queries), self._k), -torch.inf)
        ids = torch.full_like(scores, NO_ID, dtype=torch.int64)
        for ids_of_block, vectors in self._blocks(shards):
            scores, places = torch.cat([scores, queries @ vectors.T], 1).topk(self._k, dim=1)
            ids = torch.cat([ids, ids_of_block.expand(len(queries), -1)], 1).gather(1, places)
        return scores, ids

    def _blocks(self, shards: list[_Shard]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields blocks of items: their ids `[items]`, and their vectors `[items, dim]` of length 1."""
        for ids, places, rows in shards:
            for start in range(0, len(ids), ROWS_PER_BLOCK):
                block = slice(start, start + ROWS_PER_BLOCK)
                yield ids[block], functional.normalize(rows[places[block]].float(), eps=self._l2_norm_eps)

    def _held_items(self) -> tuple[int, list[_Shard]]:
        """Returns the width of the item table, and this rank's shards of it."""
        if self._model is None:
            raise RuntimeError(
                "metrics over a catalogue read the model's table: bind the sharded model first"
            )
        key = f"embeddings.{self._table}.weight"
        sharded = [module for module in self._model.modules() if isinstance(module, ShardedModule)]
        tables = (module.state_dict().get(key) for module in sharded)
        table = next((table for table in tables if table is not None), None)
        if table is None:
            raise ValueError(
                f"the model has no sharded table {self._table!r}; expected it in an "
                "EmbeddingCollection, sharded by rows"
            )
        _, dim = table.metadata().size
        catalogue = self._catalogue.to(self._device)
        for module in sharded:
            if isinstance(module, ShardedUnboundedEmbeddingCollection) and module.has_table(self._table):
                ids, places = module.held_ids(self._table)
                is_item = torch.isin(ids, catalogue)
                return dim, [(ids[is_item], places[is_item], table.local_shards()[0].tensor)]
        shards = []
        for shard in table.local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.tensor
            ids = catalogue[(catalogue >= first) & (catalogue < first + len(rows))]
            shards.append((ids, ids - first, rows))
        return dim, shards
