"""What every rank must know of every sample before it can plan, gathered in one collective."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed.failures import portable, raise_first, sent_by
from commons.distributed.rank_group import RankGroup
from commons.distributed.sample_facts import NUM_COUNTS, SampleFacts
from commons.sequence_batch import containers
from commons.sequence_batch.row_schema import FieldValue, RowSchema
from commons.sequence_batch.sample_rows import SampleRows, knows_padding

logger = logging.getLogger(__name__)
_OK, _NO_BATCH, _FAILED = range(3)


@dataclass(frozen=True)
class GatheredFacts:
    """`SampleFacts` of all ranks.

    Attributes:
        schema: the fields of the batches.
        pads: whether batches know their padding rows, so that they may be padded.
        batch_sizes, num_loaded: int64 `[ranks, window]`, 0 where a rank had no batch left.
        workloads, tokens, loss_tokens: int64 `[samples]`, one rank behind the other.
        num_elements: int64 `[samples, jagged fields]`.
    """

    schema: RowSchema
    pads: bool
    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    num_elements: np.ndarray


@dataclass(frozen=True)
class _Offer:
    """A rank's part of the agreement.

    Attributes:
        schema: the fields of its first batch.
        capacity: rows that a gather carries per rank.
        real_row: fields of one of its samples; None where batches know their padding.
        notes: lines for the user about its first batch.
    """

    schema: RowSchema
    capacity: int
    real_row: dict[str, FieldValue] | None
    notes: list[str]


@dataclass
class _Agreement:
    """The outcome of the first batch: schema, rows of a gather, the row of ranks without samples."""

    schema: RowSchema
    capacity: int
    padding_batch: Any
    pinned: bool


class PlanGather:
    """Gathers sample facts over a group; a failure on one rank is raised on all of them.

    The first call agrees on the schema, on a row for ranks that have no samples, and on the rows that a
    gather carries per rank. Every later one is a single all-gather of equal sizes, unless a rank has more
    rows than any before: then all ranks see that and gather once more.

    Args:
        group: the ranks.
        window: batches per rank that are planned together.
        sample_rows: reads the rows of batches.
    """

    def __init__(self, group: RankGroup, window: int, sample_rows: SampleRows) -> None:
        self._group = group
        self._sample_rows = sample_rows
        self._window = window
        self._header = 2 + 2 * window  # status, schema fingerprint, rows and real rows of each batch
        self._agreement: _Agreement | None = None

    @property
    def schema(self) -> RowSchema | None:
        """What the ranks agreed on; None before the first batch."""
        return None if self._agreement is None else self._agreement.schema

    @property
    def pads(self) -> bool:
        """Whether batches know their padding rows; True before the first batch, when there are no others."""
        return self._agreement is None or knows_padding(self._agreement.padding_batch)

    def padding_batch(self) -> Any:
        """A batch of one row, for a rank without samples: padding, or a copy of a real row, the same on all
        ranks, where batches do not know their padding.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        agreed = self._agreement
        if agreed is None:
            raise RuntimeError("no rank of the group has had a batch yet, so that its fields are unknown")
        # A model may work in place on what it is given.
        row = self._sample_rows.copied(agreed.padding_batch)
        return containers.pinned(row) if agreed.pinned else row

    def gather(
        self,
        facts: SampleFacts | None,
        failure: Exception | None,
        padding_batch: Any,
        notes: list[str],
    ) -> GatheredFacts | None:
        """Facts of all ranks; None if no rank has had a batch yet. Collective, also for ranks without one.

        Args:
            facts: of this rank's batches; None if its loader has ended, or if `failure` is given.
            failure: what kept this rank from giving facts.
            padding_batch: one padding row of this rank's, or one of its samples; used by the first call that
                any rank has facts in.
            notes: lines for the user about its first batch; rank 0 logs those of the first rank with any.

        Raises:
            ValueError: batches of different ranks or steps differ in their fields.
            Exception: the failure of the first rank that has one, on every rank.
        """
        if self._agreement is None:
            self._agreement = self._agree(facts, failure, padding_batch, notes)
        agreed = self._agreement
        if agreed is None:
            return None
        table = self._group.all_gather(self._encode(facts, failure, agreed))
        most = int(table[:, 2 : self._header : 2].sum(1).max())
        if most > agreed.capacity:
            agreed.capacity = most
            table = self._group.all_gather(self._encode(facts, failure, agreed))
        self._raise_if_any_failed(table, facts, failure, agreed.schema)
        sizes = table[:, 2 : self._header].reshape(self._group.num_ranks, self._window, 2)
        per_rank = table[:, self._header :].reshape(self._group.num_ranks, agreed.capacity, -1)
        num_loaded = sizes[:, :, 1].copy()
        per_sample = np.concatenate(
            [rows[:real] for rows, real in zip(per_rank, num_loaded.sum(1), strict=True)]
        )
        workloads, tokens, loss_tokens = per_sample[:, :NUM_COUNTS].T
        return GatheredFacts(
            schema=agreed.schema,
            pads=self.pads,
            batch_sizes=sizes[:, :, 0].copy(),
            num_loaded=num_loaded,
            workloads=workloads,
            tokens=tokens,
            loss_tokens=loss_tokens,
            num_elements=per_sample[:, NUM_COUNTS:],
        )

    def _encode(self, facts: SampleFacts | None, failure: Exception | None, agreed: _Agreement) -> np.ndarray:
        """This rank's part of the gather; left empty where the others will see that it does not fit."""
        columns = NUM_COUNTS + len(agreed.schema.jagged_fields)
        row = np.zeros(self._header + agreed.capacity * columns, dtype=np.int64)
        if facts is None:
            row[0] = _NO_BATCH if failure is None else _FAILED
            return row
        row[:2] = _OK, facts.schema.fingerprint
        num_batches = len(facts.batch_sizes)
        row[2 : 2 + 2 * num_batches : 2] = facts.batch_sizes
        row[3 : 3 + 2 * num_batches : 2] = facts.num_loaded
        if facts.batch_sizes.sum() <= agreed.capacity and facts.schema == agreed.schema:
            row[self._header : self._header + facts.per_sample.size] = facts.per_sample.ravel()
        return row

    def _agree(
        self, facts: SampleFacts | None, failure: Exception | None, padding_batch: Any, notes: list[str]
    ) -> _Agreement | None:
        """The first call's agreement; None if no rank has a batch."""
        mine = None
        if facts is not None:
            row = None if knows_padding(padding_batch) else self._sample_rows.per_sample_fields(padding_batch)
            capacity = int(facts.batch_sizes.max()) * self._window
            mine = _Offer(facts.schema, capacity, row, notes)
        gathered = self._group.all_gather_objects((mine, portable(failure)))
        raise_first([failed for _, failed in gathered], failure, self._group.rank)
        offers = [offer for offer, _ in gathered]
        ranks_with_batch = [rank for rank, offer in enumerate(offers) if offer is not None]
        if not ranks_with_batch:
            return None
        first = ranks_with_batch[0]
        agreed = offers[first]
        _raise_if_different(agreed.schema, f"rank {first}", [None if o is None else o.schema for o in offers])
        for rank in ranks_with_batch:
            if (offers[rank].real_row is None) != (agreed.real_row is None):
                raise ValueError(
                    f"batches of rank {first} and rank {rank} are of different types, of which only one "
                    "knows its padding rows; all ranks must have batches of one type"
                )
        if not dist.is_initialized() or dist.get_rank() == 0:
            for note in next((offers[rank].notes for rank in ranks_with_batch if offers[rank].notes), []):
                logger.warning(note)
        pinned = mine is not None and self._sample_rows.is_pinned(padding_batch)
        if len(ranks_with_batch) < len(offers):
            sent = sent_by(first, padding_batch, self._group.rank, self._group.all_gather_objects)
            padding_batch = sent if mine is None else padding_batch
        if agreed.real_row is not None:
            padding_batch = self._sample_rows.with_rows(padding_batch, agreed.real_row, 1, 1)
        capacity = max(offers[rank].capacity for rank in ranks_with_batch)
        return _Agreement(agreed.schema, capacity, padding_batch, pinned)

    def _raise_if_any_failed(
        self, table: np.ndarray, facts: SampleFacts | None, failure: Exception | None, schema: RowSchema
    ) -> None:
        if (table[:, 0] == _FAILED).any():
            failures = self._group.all_gather_objects(portable(failure))
            raise_first(failures, failure, self._group.rank)
        differs = (table[:, 0] == _OK) & (table[:, 1] != schema.fingerprint)
        if differs.any():
            schemas = self._group.all_gather_objects(None if facts is None else facts.schema)
            _raise_if_different(schema, "the first batch", schemas)


def _raise_if_different(expected: RowSchema, whose: str, schemas: list[RowSchema | None]) -> None:
    for rank, schema in enumerate(schemas):
        difference = "" if schema is None else expected.difference(schema)
        if difference:
            raise ValueError(
                f"rank {rank} has a batch that differs from that of {whose}: {difference}; batches of all "
                "ranks and steps must have the same fields, keys, dtypes and trailing shapes"
            )
