"""HitRate, Recall and NDCG of a ranking of all items, whose embeddings are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torchrec.distributed.types import ShardedModule

from commons.training.evaluation_metrics import EvaluationMetrics
from commons.training.retrieval_metrics import RetrievalMetrics, parsed_names
from commons.unbounded_ids import NO_ID, ShardedUnboundedEmbeddingCollection

# Queries of all ranks that are scored together, and rows of a table: 64 MiB of scores.
QUERIES_PER_CHUNK = 512
ROWS_PER_BLOCK = 1 << 15


@dataclass(frozen=True)
class RankedItems:
    """What `RetrievalMetrics` takes.

    Attributes:
        items: `[queries, k]`, best first; `NO_ID` where there are fewer items.
        targets: `[queries]`, the right ones.
    """

    items: torch.Tensor
    targets: torch.Tensor


class CatalogueMetrics(EvaluationMetrics):
    """Ranks all items of a catalogue for each query, by the product of vectors of length 1.

    Every rank scores the queries of all ranks against the rows of the items' table that it holds, and
    each query's own rank merges the best of every rank. Items of equal score have no particular order.
    Of a table of unbounded ids the items that have a row are ranked; one without is never found.

    Args:
        names: as `parsed_names` takes them.
        setting: where they come from, for messages.
        table: name of the items' table, sharded by rows in an `EmbeddingCollection` of the model or one of
            unbounded ids.
        catalogue: `[items]`, rising, ids that are items; others are not ranked.
        l2_norm_eps: smallest length that an embedding is divided by.
        device: of the outputs.

    Raises:
        ValueError: an unknown name.
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
        """Takes the sharded model, whose table is read whenever the figures are computed."""
        self._model = model

    def update(self, output: Any) -> None:
        """Takes queries `[queries, dim]` float32 of length 1, and the right items `targets` `[queries]`."""
        self._queries.append(output.queries)
        self._targets.append(output.targets)

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """The mean of each metric, by its name as given; NaN if no rank had a query. Collective.

        Ranks may have different numbers of queries, or none. `QUERIES_PER_CHUNK` of them are gathered
        and scored at a time, against `ROWS_PER_BLOCK` rows; three collectives for each chunk.

        Raises:
            RuntimeError: no model was bound.
            ValueError: it has no such table.
        """
        held = self._held_items()
        queries = torch.cat([torch.empty(0, held.dim, device=self._device), *self._queries])
        targets = torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *self._targets])
        self._queries, self._targets = [], []
        most = torch.tensor(len(queries), device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        rows = max(QUERIES_PER_CHUNK // dist.get_world_size(), 1)
        for start in range(0, int(most), rows):
            of_chunk = queries[start : start + rows]
            items = self._best_of_all_ranks(of_chunk, min(rows, int(most) - start), held)
            self._gains.update(RankedItems(items, targets[start : start + rows]))
        return self._gains.compute()

    def _best_of_all_ranks(self, queries: torch.Tensor, rows: int, held: _HeldItems) -> torch.Tensor:
        """int64 `[queries, k]`, best first.

        Args:
            queries: `[at most rows, dim]` of this rank.
            rows: what every rank brings, padded.
            held: the items of this rank.
        """
        ranks = dist.get_world_size()
        padded = functional.pad(queries, (0, 0, 0, rows - len(queries)))
        gathered = padded.new_empty(ranks * rows, padded.shape[1])
        dist.all_gather_into_tensor(gathered, padded)
        merged = []
        for of_all_queries in _best_of_blocks(gathered, held.blocks(self._l2_norm_eps), self._k):
            of_all_ranks = torch.empty_like(of_all_queries)
            dist.all_to_all_single(of_all_ranks, of_all_queries)
            # From [rank, query, k] to one row per query.
            merged.append(of_all_ranks.view(ranks, rows, -1).transpose(0, 1).flatten(1)[: len(queries)])
        scores, items = merged
        return items.gather(1, scores.topk(self._k, dim=1).indices)

    def _held_items(self) -> _HeldItems:
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
                rows = table.local_shards()[0].tensor
                return _HeldItems(dim, [_Shard(ids[is_item], places[is_item], rows)])
        shards = []
        for shard in table.local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.tensor
            ids = catalogue[(catalogue >= first) & (catalogue < first + len(rows))]
            shards.append(_Shard(ids, ids - first, rows))
        return _HeldItems(dim, shards)


@dataclass(frozen=True)
class _Shard:
    """Items with rows on this rank.

    Attributes:
        ids: int64 `[items]`.
        places: int64 `[items]`, where each one's row is.
        rows: `[any, dim]`.
    """

    ids: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class _HeldItems:
    """What one rank holds of the items' table.

    Attributes:
        dim: width of the table.
        shards: the items.
    """

    dim: int
    shards: list[_Shard]

    def blocks(self, l2_norm_eps: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The items, some at a time: their ids `[items]`, and vectors `[items, dim]` of length 1."""
        for shard in self.shards:
            for start in range(0, len(shard.ids), ROWS_PER_BLOCK):
                places = shard.places[start : start + ROWS_PER_BLOCK]
                vectors = functional.normalize(shard.rows[places].float(), dim=1, eps=l2_norm_eps)
                yield shard.ids[start : start + ROWS_PER_BLOCK], vectors


def _best_of_blocks(
    queries: torch.Tensor, blocks: Iterable[tuple[torch.Tensor, torch.Tensor]], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[queries, k]` and ids of the best items; −∞ and `NO_ID` where there are fewer."""
    scores = queries.new_full((len(queries), k), -torch.inf)
    ids = torch.full_like(scores, NO_ID, dtype=torch.int64)
    for ids_of_block, vectors in blocks:
        scores, places = torch.cat([scores, queries @ vectors.T], 1).topk(k, dim=1)
        ids = torch.cat([ids, ids_of_block.expand(len(queries), -1)], 1).gather(1, places)
    return scores, ids
