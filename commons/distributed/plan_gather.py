"""Gathers what every rank must know of every sample before it can plan, in one collective."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed.channel import Channel
from commons.distributed.failures import portable, raise_first, sent_by
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.sample_facts import SampleFacts, loaded_samples, num_columns
from commons.distributed.shuffler_settings import ShufflerSettings
from commons.sequence_batch import BaseBatch, containers
from commons.sequence_batch.cut_rules import CutRules
from commons.sequence_batch.row_schema import FieldValue, RowSchema
from commons.sequence_batch.sample_rows import SampleRows, knows_padding

logger = logging.getLogger(__name__)
_OK, _NO_BATCH, _FAILED = range(3)


@dataclass(frozen=True)
class _Offer:
    """A rank's part of the agreement.

    Attributes:
        schema: fields of its first batch.
        count_names: names of its `row_counts`.
        has_groups: whether its samples have groups.
        capacity: rows that a gather carries per rank.
        real_row: fields of one of its samples; None where batches know their padding.
        notes: lines for the user about its first batch.
        cut_rules: how its batches are cut; None where samples stay whole.
    """

    schema: RowSchema
    count_names: tuple[str, ...]
    has_groups: bool
    capacity: int
    real_row: dict[str, FieldValue] | None
    notes: list[str]
    cut_rules: CutRules | None


class BatchFormat:
    """The batch format that the ranks agreed on at the first batch.

    Attributes:
        schema: fields of every batch.
        count_names: names of every batch's `row_counts`.
        has_groups: whether samples have groups.
        pads: whether batches know their padding rows, and so may be padded.
        cut_rules: how samples are cut; None where they stay whole.
    """

    def __init__(
        self,
        schema: RowSchema,
        count_names: tuple[str, ...],
        has_groups: bool,
        padding_batch: Any,
        sample_rows: SampleRows,
        pinned: bool,
        cut_rules: CutRules | None = None,
    ) -> None:
        self.cut_rules = cut_rules
        self.schema = schema
        self.count_names = count_names
        self.has_groups = has_groups
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
        num_posted: numbers that each rank sends along; the same on all ranks.

    Attributes:
        agreed: the outcome of the first batch; None before it.
    """

    def __init__(
        self, channel: Channel, settings: ShufflerSettings, sample_rows: SampleRows, num_posted: int
    ) -> None:
        self._channel = channel
        self._sample_rows = sample_rows
        self._settings = settings
        # Status, schema fingerprint, posts; then rows and real rows.
        self._sizes = 2 + num_posted
        self._header = self._sizes + 2
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
            post: int64 `[num_posted]`, for the other ranks.

        Returns:
            The samples of all ranks; int64 `[ranks, num_posted]`, what each rank posted.

        Raises:
            ValueError: batches of different ranks or steps differ in their fields, or ranks in their
                settings.
            Exception: the failure of the first rank that has one, on every rank.
        """
        if self.agreed is None:
            self._agree(facts, failure, first_batch)
        if self.agreed is None:  # no rank has ever had a batch
            return _nothing(self._channel.num_ranks, len(post))
        schema = self.agreed.schema
        if facts is not None and facts.count_names != self.agreed.count_names:
            failure = failure or ValueError(
                f"a batch has row_counts of {facts.count_names}, the first one had {self.agreed.count_names}"
            )
            facts = None
        table = self._channel.all_gather(self._encode(facts, failure, schema, post))
        most = int(table[:, self._sizes].max())
        if most > self._capacity:
            self._capacity = most
            table = self._channel.all_gather(self._encode(facts, failure, schema, post))
        self._raise_if_any_failed(table, facts, failure, schema)
        batch_sizes, num_loaded = table[:, self._sizes : self._header].T.copy()
        per_rank = table[:, self._header :].reshape(self._channel.num_ranks, self._capacity, -1)
        per_sample = np.concatenate([rows[:real] for rows, real in zip(per_rank, num_loaded, strict=True)])
        agreed = self.agreed.count_names, self.agreed.has_groups
        samples = loaded_samples(per_sample, batch_sizes, num_loaded, schema, *agreed)
        return samples, table[:, 2 : self._sizes].copy()

    def _encode(
        self, facts: SampleFacts | None, failure: Exception | None, schema: RowSchema, post: np.ndarray
    ) -> np.ndarray:
        """Returns this rank's part of the gather. It leaves out samples beyond the agreed rows, which the
        others see from the header."""
        columns = 0
        if self.agreed is not None:
            columns = num_columns(schema, self.agreed.count_names, self.agreed.has_groups)
        row = np.zeros(self._header + self._capacity * columns, dtype=np.int64)
        row[2 : self._sizes] = post
        if facts is None:
            row[0] = _NO_BATCH if failure is None else _FAILED
            return row
        row[:2] = _OK, facts.schema.fingerprint
        row[self._sizes : self._header] = facts.batch_size, len(facts.per_sample)
        if facts.batch_size <= self._capacity and facts.schema == schema:
            row[self._header : self._header + facts.per_sample.size] = facts.per_sample.ravel()
        return row

    def _agree(self, facts: SampleFacts | None, failure: Exception | None, first_batch: Any) -> None:
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
        gathered = self._channel.all_gather_objects((mine, portable(failure), self._settings, self._sizes))
        for rank, (_, _, settings, sizes) in enumerate(gathered):
            if settings != gathered[0][2]:
                raise ValueError(
                    f"rank {rank}'s shuffler has {settings}, that of rank 0 {gathered[0][2]}; all ranks need "
                    "the same settings"
                )
            if sizes != gathered[0][3]:
                raise ValueError(
                    f'only one of the ranks 0 and {rank} has cost="learned"; all ranks need the same cost'
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
            if offers[rank].count_names != agreed.count_names:
                raise ValueError(
                    f"rank {rank} has a batch with row_counts of {offers[rank].count_names}, rank {first} of "
                    f"{agreed.count_names}; batches of all ranks must have the same"
                )
            if offers[rank].has_groups != agreed.has_groups:
                has, has_not = (rank, first) if offers[rank].has_groups else (first, rank)
                raise ValueError(
                    f"rank {has}'s shuffler has get_groups, and rank {has_not}'s has not; all ranks need the "
                    "same shuffler"
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
            agreed.count_names,
            agreed.has_groups,
            padding_batch,
            self._sample_rows,
            pinned,
            agreed.cut_rules,
        )

    def _offer(self, facts: SampleFacts, first_batch: Any, padding_batch: Any) -> _Offer:
        knows = knows_padding(padding_batch)
        return _Offer(
            schema=facts.schema,
            count_names=facts.count_names,
            has_groups=facts.has_groups,
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
        rules.check(facts.schema, facts.count_names)
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
