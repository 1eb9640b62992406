"""What every rank must know of every sample before it can plan, gathered in one collective."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.rank_group import RankGroup
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.row_schema import RowSchema

_OK, _NO_BATCH, _FAILED = range(3)
_HEADER = 4  # status, schema fingerprint, rows, real rows


@dataclass(frozen=True)
class SampleFacts:
    """One rank's batch, as far as planning needs it.

    Attributes:
        schema: the fields of the batch.
        batch_size: rows, padding included.
        per_sample: int64 `[real rows, 3 + jagged fields]`: workload, tokens, loss tokens, elements of each
            jagged field.
        padding_batch: one padding row, for ranks that have no batch; None once ranks have agreed.
    """

    schema: RowSchema
    batch_size: int
    per_sample: np.ndarray
    padding_batch: BaseBatch | None


@dataclass(frozen=True)
class GatheredFacts:
    """`SampleFacts` of all ranks: one number per rank, and `per_sample` one rank behind the other."""

    schema: RowSchema
    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    per_sample: np.ndarray


@dataclass
class _Agreement:
    """What ranks agreed on at the first batch; `capacity` is the rows that a gather carries per rank."""

    schema: RowSchema
    padding_batch: BaseBatch
    capacity: int


class PlanGather:
    """Gathers sample facts over a group; a failure on one rank is raised on all of them.

    The first call agrees on the schema, on a padding row for ranks that have no batch, and on the rows that
    a gather carries per rank. Every later one is a single all-gather of equal sizes, unless a batch has more
    rows than any before: then all ranks see that and gather once more.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._agreement: _Agreement | None = None

    @property
    def schema(self) -> RowSchema | None:
        """What the ranks agreed on; None before the first batch."""
        return None if self._agreement is None else self._agreement.schema

    def padding_batch(self) -> BaseBatch:
        """A batch of one padding row, for a rank whose loader has ended while others go on.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        if self._agreement is None:
            raise RuntimeError(
                "this rank's loader gave no batch at all while ranks that it does not balance with have one; "
                "its fields are unknown. Give every rank at least one batch"
            )
        return self._agreement.padding_batch

    def gather(self, facts: SampleFacts | None, failure: Exception | None) -> GatheredFacts | None:
        """Facts of all ranks; None if no rank has had a batch yet. Collective, also for ranks without one.

        Args:
            facts: of this rank's batch; None if its loader has ended, or if `failure` is given.
            failure: what kept this rank from giving facts.

        Raises:
            ValueError: batches of different ranks or steps differ in their fields.
            Exception: the failure of the first rank that has one, on every rank.
        """
        if self._agreement is None:
            self._agreement = self._agree(facts, failure)
        agreed = self._agreement
        if agreed is None:
            return None
        table = self._all_gather(_encode(facts, failure, agreed))
        if int(table[:, 2].max()) > agreed.capacity:
            agreed.capacity = int(table[:, 2].max())
            table = self._all_gather(_encode(facts, failure, agreed))
        self._raise_if_any_failed(table, facts, failure, agreed.schema)
        per_rank = table[:, _HEADER:].reshape(self._group.num_ranks, agreed.capacity, -1)
        return GatheredFacts(
            schema=agreed.schema,
            batch_sizes=table[:, 2].copy(),
            num_loaded=table[:, 3].copy(),
            per_sample=np.concatenate(
                [rows[:real] for rows, real in zip(per_rank, table[:, 3], strict=True)]
            ),
        )

    def _all_gather(self, row: np.ndarray) -> np.ndarray:
        if self._group.planning is None:
            return row[None]
        table = torch.empty(self._group.num_ranks, len(row), dtype=torch.int64)
        dist.all_gather_into_tensor(table.view(-1), torch.from_numpy(row), group=self._group.planning)
        return table.numpy()

    def _all_gather_objects(self, value: Any) -> list[Any]:
        if self._group.planning is None:
            return [value]
        values: list[Any] = [None] * self._group.num_ranks
        dist.all_gather_object(values, value, group=self._group.planning)
        return values

    def _agree(self, facts: SampleFacts | None, failure: Exception | None) -> _Agreement | None:
        """The first call's agreement; None if no rank has a batch."""
        mine = None if facts is None else (facts.schema, facts.batch_size)
        gathered = self._all_gather_objects((mine, _portable(failure, self._group.rank)))
        _raise_first([failed for _, failed in gathered], failure, self._group.rank)
        offers = [offer for offer, _ in gathered]
        ranks_with_batch = [rank for rank, offer in enumerate(offers) if offer is not None]
        if not ranks_with_batch:
            return None
        first = ranks_with_batch[0]
        schema = offers[first][0]
        _raise_if_different(schema, f"rank {first}", [None if o is None else o[0] for o in offers])
        padding_batch: Any = None if facts is None else facts.padding_batch
        if len(ranks_with_batch) < len(offers):
            padding_batch = self._all_gather_objects(padding_batch if self._group.rank == first else None)[
                first
            ]
        return _Agreement(schema, padding_batch, max(offers[rank][1] for rank in ranks_with_batch))

    def _raise_if_any_failed(
        self, table: np.ndarray, facts: SampleFacts | None, failure: Exception | None, schema: RowSchema
    ) -> None:
        if (table[:, 0] == _FAILED).any():
            _raise_first(
                self._all_gather_objects(_portable(failure, self._group.rank)), failure, self._group.rank
            )
        differs = (table[:, 0] == _OK) & (table[:, 1] != schema.fingerprint)
        if differs.any():
            schemas = self._all_gather_objects(None if facts is None else facts.schema)
            _raise_if_different(schema, "the first batch", schemas)


def _encode(facts: SampleFacts | None, failure: Exception | None, agreed: _Agreement) -> np.ndarray:
    """One rank's part of the gather; left empty where the others will see that it does not fit."""
    columns = 3 + len(agreed.schema.jagged_fields)
    row = np.zeros(_HEADER + agreed.capacity * columns, dtype=np.int64)
    if facts is None:
        row[0] = _NO_BATCH if failure is None else _FAILED
        return row
    row[:_HEADER] = _OK, facts.schema.fingerprint, facts.batch_size, len(facts.per_sample)
    if facts.batch_size <= agreed.capacity and facts.schema == agreed.schema:
        row[_HEADER : _HEADER + facts.per_sample.size] = facts.per_sample.ravel()
    return row


def _portable(failure: Exception | None, rank: int) -> Exception | None:
    """A copy for other ranks, with the traceback, which does not travel, as a note."""
    if failure is None:
        return None
    where = "".join(traceback.format_exception(failure))
    try:
        portable = pickle.loads(pickle.dumps(failure))
    except Exception:
        portable = RuntimeError(f"{type(failure).__name__}: {failure}")
    portable.add_note(f"raised on rank {rank} of the ranks to balance among:\n{where}")
    return portable


def _raise_first(failures: list[Exception | None], own: Exception | None, own_rank: int) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise own if own is not None and rank == own_rank else failure


def _raise_if_different(expected: RowSchema, whose: str, schemas: list[RowSchema | None]) -> None:
    for rank, schema in enumerate(schemas):
        difference = "" if schema is None else expected.difference(schema)
        if difference:
            raise ValueError(
                f"rank {rank} has a batch that differs from that of {whose}: {difference}; batches of all "
                "ranks and steps must have the same fields, keys, dtypes and trailing shapes"
            )
