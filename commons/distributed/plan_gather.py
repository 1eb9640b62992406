"""Gathers what every rank must know of every sample before it can plan, in one collective."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from ..perf_model.cost import Cost
from ..sequence_batch import BaseBatch, containers
from ..sequence_batch.cut_rules import CutRules
from ..sequence_batch.row_schema import FieldValue, RowSchema
from ..sequence_batch.sample_rows import SampleRows, knows_padding
from .channel import Channel
from .failures import portable, raise_first, sent_by
from .loaded_samples import LoadedSamples
from .sample_facts import SampleColumns, SampleFacts, loaded_samples
from .shuffler_settings import ShufflerSettings

logger = logging.getLogger(__name__)
_OK, _NO_BATCH, _FAILED = range(3)
# What a rank gathers begins with its status and the schema's fingerprint, then its rows and real rows. Posts
# and samples follow.
_FIRST, _SIZES = 2, 2


@dataclass(frozen=True)
class _Offer:
    """A rank's part of the agreement.

    Attributes:
        schema: fields of its first batch.
        columns: what is known of its samples besides.
        capacity: rows that a gather carries per rank.
        real_row: fields of one of its samples; None where batches know their padding.
        notes: lines for the user about its first batch.
        cut_rules: how its batches are cut; None where samples stay whole.
    """

    schema: RowSchema
    columns: SampleColumns
    capacity: int
    real_row: dict[str, FieldValue] | None
    notes: list[str]
    cut_rules: CutRules | None


class BatchFormat:
    """The batch format that the ranks agreed on at the first batch.

    Attributes:
        schema: fields of every batch.
        columns: what is known of every sample besides.
        pads: whether batches know their padding rows, and so may be padded.
        cut_rules: how samples are cut; None where they stay whole.
    """

    def __init__(
        self,
        schema: RowSchema,
        columns: SampleColumns,
        padding_batch: Any,
        sample_rows: SampleRows,
        pinned: bool,
        cut_rules: CutRules | None = None,
    ) -> None:
        self.cut_rules = cut_rules
        self.schema = schema
        self.columns = columns
        self.pads = knows_padding(padding_batch)
        self._padding_batch, self._sample_rows, self._pinned = padding_batch, sample_rows, pinned

    def padding_batch(self) -> Any:
        """Returns a batch of one row, for a rank without samples, with the same row on all ranks: padding, or
        a copy of a real row where batches do not know their padding."""
        row = self._sample_rows.copied(self._padding_batch)  # a model may work in place on what it is given
        return containers.pinned(row) if self._pinned else row


class PlanGather:
    """Gathers sample facts over a group; a failure on one rank is raised on all of them.

    The first call agrees on the schema, on a row for ranks without samples, and on the number of rows that a
    gather carries per rank. Every later one is a single all-gather of equal sizes. If a rank has more rows
    than any before, all ranks see that and gather once more.

    Args:
        channel: of the ranks; used by one thread at a time.
        settings: how to place samples; the same on all ranks.
        sample_rows: reads the rows of batches.
        cost: as `BatchShuffler` takes it; the same on all ranks.

    Attributes:
        agreed: the outcome of the first batch; None before it.
    """

    def __init__(
        self, channel: Channel, settings: ShufflerSettings, sample_rows: SampleRows, cost: Cost | str | None
    ) -> None:
        self._channel = channel
        self._sample_rows = sample_rows
        self._settings, self._cost = settings, cost
        self._capacity = 0  # rows that a gather carries per rank
        self.agreed: BatchFormat | None = None

    def gather(
        self, facts: SampleFacts | None, failure: Exception | None, first_batch: Any, post: np.ndarray
    ) -> tuple[LoadedSamples, np.ndarray]:
        """Gathers the facts of all ranks. Collective, also for ranks without a batch.

        Args:
            facts: of this rank's batch; None if its loader has ended, or if `failure` is given.
            failure: the error that kept this rank from giving facts.
            first_batch: this rank's first batch, for the agreement.
            post: int64 `[num_posted]`, for the other ranks; as long on all of them.

        Returns:
            The samples of all ranks; int64 `[ranks, num_posted]`, what each rank posted.

        Raises:
            ValueError: batches of different ranks or steps differ in their fields, or ranks in their
                settings.
            Exception: the failure of the first rank that has one, on every rank.
        """
        if self.agreed is None:
            self._agree(facts, failure, first_batch, len(post))
        if self.agreed is None:  # no rank has ever had a batch
            return _nothing(self._channel.num_ranks, len(post))
        schema = self.agreed.schema
        if facts is not None and facts.columns != self.agreed.columns:
            failure = failure or ValueError(
                f"a batch has {facts.columns}; the first one had {self.agreed.columns}"
            )
            facts = None
        table = self._channel.all_gather(self._encode(facts, failure, schema, post))
        most = int(table[:, _FIRST].max())
        if most > self._capacity:
            self._capacity = most
            table = self._channel.all_gather(self._encode(facts, failure, schema, post))
        self._raise_if_any_failed(table, facts, failure, schema)
        header = _FIRST + _SIZES + len(post)
        batch_sizes, num_loaded = table[:, _FIRST : _FIRST + _SIZES].T.copy()
        per_rank = table[:, header:].reshape(self._channel.num_ranks, self._capacity, -1)
        per_sample = np.concatenate([rows[:real] for rows, real in zip(per_rank, num_loaded, strict=True)])
        samples = loaded_samples(per_sample, batch_sizes, num_loaded, schema, self.agreed.columns)
        return samples, table[:, _FIRST + _SIZES : header].copy()

    def _encode(
        self, facts: SampleFacts | None, failure: Exception | None, schema: RowSchema, post: np.ndarray
    ) -> np.ndarray:
        """Returns this rank's part of the gather. It leaves out samples beyond the agreed rows, which the
        others see from the header."""
        columns = 0 if self.agreed is None else self.agreed.columns.width(schema)
        header = _FIRST + _SIZES + len(post)
        row = np.zeros(header + self._capacity * columns, dtype=np.int64)
        row[_FIRST + _SIZES : header] = post
        if facts is None:
            row[0] = _NO_BATCH if failure is None else _FAILED
            return row
        row[:2] = _OK, facts.schema.fingerprint
        row[_FIRST : _FIRST + _SIZES] = facts.batch_size, len(facts.per_sample)
        if facts.batch_size <= self._capacity and facts.schema == schema:
            row[header : header + facts.per_sample.size] = facts.per_sample.ravel()
        return row

    def _agree(
        self, facts: SampleFacts | None, failure: Exception | None, first_batch: Any, num_posted: int
    ) -> None:
        """Sets `agreed`, unless no rank has a batch."""
        mine, padding_batch, pinned = None, None, False
        if facts is not None and failure is None:
            try:
                on_host = self._sample_rows.to_host(first_batch)
                padding_batch = self._sample_rows.row_or_padding(on_host)
                pinned = self._sample_rows.is_pinned(first_batch)
                mine = self._offer(facts, on_host, padding_batch)
            except Exception as error:
                failure = error
        same = {"settings": repr(self._settings), "cost": f"cost={self._cost!r}"}
        gathered = self._channel.all_gather_objects((mine, portable(failure), same, num_posted))
        for rank, (_, _, of_rank, posts) in enumerate(gathered):
            for name, of_first in gathered[0][2].items():
                if of_rank[name] != of_first:
                    raise ValueError(
                        f"rank {rank}'s shuffler has {of_rank[name]}, that of rank 0 {of_first}; all ranks "
                        f"need the same {name}"
                    )
            if posts != gathered[0][3]:
                raise ValueError(
                    f"only one of the ranks 0 and {rank} has restored what was learned; "
                    "load_learning_state on every rank"
                )
        raise_first([failed for _, failed, _, _ in gathered], failure, self._channel.rank)
        offers = [offer for offer, _, _, _ in gathered]
        ranks_with_batch = [rank for rank, offer in enumerate(offers) if offer is not None]
        if not ranks_with_batch:
            return
        first = ranks_with_batch[0]
        agreed = offers[first]
        _raise_if_different(agreed.schema, f"rank {first}", [None if o is None else o.schema for o in offers])
        for rank in ranks_with_batch:
            if offers[rank].cut_rules != agreed.cut_rules:
                raise ValueError(
                    f"rank {rank}'s batch has cut_rules {offers[rank].cut_rules}, that of rank {first} "
                    f"{agreed.cut_rules}; all ranks must cut samples alike"
                )
            if offers[rank].columns != agreed.columns:
                raise ValueError(
                    f"rank {rank} has a batch with {offers[rank].columns}; rank {first} with "
                    f"{agreed.columns}. All ranks need the same shuffler and row_counts"
                )
            if (offers[rank].real_row is None) != (agreed.real_row is None):
                raise ValueError(
                    f"batches of rank {first} and rank {rank} are of different types, of which only one "
                    "knows its padding rows; all ranks must have batches of one type"
                )
        if not dist.is_initialized() or dist.get_rank() == 0:
            for note in next((offers[rank].notes for rank in ranks_with_batch if offers[rank].notes), []):
                logger.warning(note)
        if len(ranks_with_batch) < len(offers):
            sent = sent_by(first, padding_batch, self._channel.rank, self._channel.all_gather_objects)
            padding_batch = sent if mine is None else padding_batch
        if agreed.real_row is not None:
            padding_batch = self._sample_rows.with_rows(padding_batch, agreed.real_row, 1, 1)
        self._capacity = max(offers[rank].capacity for rank in ranks_with_batch)
        self.agreed = BatchFormat(
            agreed.schema,
            agreed.columns,
            padding_batch,
            self._sample_rows,
            pinned,
            agreed.cut_rules,
        )

    def _offer(self, facts: SampleFacts, first_batch: Any, padding_batch: Any) -> _Offer:
        knows = knows_padding(padding_batch)
        return _Offer(
            schema=facts.schema,
            columns=facts.columns,
            capacity=facts.batch_size,
            real_row=None if knows else self._sample_rows.per_sample_fields(padding_batch),
            notes=self._sample_rows.stale_numbers(first_batch),
            cut_rules=self._cut_rules(facts, first_batch) if self._settings.split else None,
        )

    def _cut_rules(self, facts: SampleFacts, first_batch: Any) -> CutRules:
        rules = first_batch.cut_rules() if isinstance(first_batch, BaseBatch) else None
        if rules is None:
            raise ValueError(
                f"split=True: a {containers.type_name(first_batch)} cannot be cut; give it cut_rules, as a "
                "BaseBatch has them"
            )
        rules.check(facts.schema, facts.columns.count_names)
        return rules

    def _raise_if_any_failed(
        self, table: np.ndarray, facts: SampleFacts | None, failure: Exception | None, schema: RowSchema
    ) -> None:
        if (table[:, 0] == _FAILED).any():
            failures = self._channel.all_gather_objects(portable(failure))
            raise_first(failures, failure, self._channel.rank)
        differs = (table[:, 0] == _OK) & (table[:, 1] != schema.fingerprint)
        if differs.any():
            schemas = self._channel.all_gather_objects(None if facts is None else facts.schema)
            _raise_if_different(schema, "the first batch", schemas)


def _nothing(num_ranks: int, num_posted: int) -> tuple[LoadedSamples, np.ndarray]:
    none, no_batch = np.zeros(0, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    return LoadedSamples(
        no_batch, no_batch, none, none, none, none.reshape(0, 0), none, none.reshape(0, 0)
    ), np.zeros((num_ranks, num_posted), dtype=np.int64)


def _raise_if_different(expected: RowSchema, whose: str, schemas: list[RowSchema | None]) -> None:
    for rank, schema in enumerate(schemas):
        difference = "" if schema is None else expected.difference(schema)
        if difference:
            raise ValueError(
                f"rank {rank} has a batch that differs from that of {whose}: {difference}; batches of all "
                "ranks and steps must have the same fields, keys, dtypes and trailing shapes"
            )
