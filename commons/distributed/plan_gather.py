"""Gathers what every rank must know of every row before it can plan, in one collective."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..sequence_batch import containers
from ..sequence_batch.batch_view import BatchView
from ..sequence_batch.packed_rows import PackedRows
from ..sequence_batch.row_schema import FieldValue, RowSchema
from .count_rows import RowFormat
from .failures import portable, raise_first
from .feature import Feature
from .rank_group import Channel, to_bytes
from .row_table import RowTable

_OK, _NO_BATCH, _FAILED = range(3)
# What a rank gathers begins with its status and the schema's fingerprint, then its rows and real rows. Posts
# and rows follow.
_FIRST, _SIZES = 2, 2

Counted = tuple[RowTable, RowFormat]


@dataclass(frozen=True)
class _Offer:
    """A rank's part of the agreement.

    Attributes:
        rows: what is known of its rows.
        capacity: rows that a gather carries per rank.
        real_row: fields of one of its samples; None where batches know their padding.
        agreed: what features have to agree on, by their names.
    """

    rows: RowFormat
    capacity: int
    real_row: dict[str, FieldValue] | None
    agreed: Mapping[str, Any]


class BatchFormat:
    """The batch format that the ranks agreed on at the first batch.

    Args:
        rows: what is known of every row.
        padding: a batch of one row, the same on all ranks.
        pinned: whether this rank's batches are in pinned memory.
        agreed: what features agreed on, by their names.

    Attributes:
        rows, agreed: as given.
        pads: whether batches know their padding rows, and so may be padded.
    """

    def __init__(
        self,
        rows: RowFormat,
        padding: BatchView,
        pinned: bool,
        agreed: Mapping[str, Any],
    ) -> None:
        self.rows, self.agreed = rows, agreed
        self.pads = padding.pads
        self._padding, self._pinned = padding, pinned

    def padding_batch(self) -> Any:
        """Returns a batch of one row, for a rank without samples, with the same row on all ranks: padding, or
        a copy of a real row where batches do not know their padding."""
        row = self._padding.copy()  # a model may work in place on what it is given
        return containers.pin(row) if self._pinned else row

    def make_batch(self, like: BatchView, rows: PackedRows, num_rows: int, row_counts: np.ndarray) -> Any:
        """Makes a batch of packed rows, padded to `num_rows`; a copy of a real row if there are none.

        Args:
            like: gives the type, and what samples share.
            rows: the samples.
            num_rows: rows of the batch.
            row_counts: int64 `[samples, names]`.
        """
        if rows.num_rows or like.pads:
            made = like.unpack(rows, num_rows)
            return self.with_row_counts(like.view(made), row_counts)
        copied = containers.move_to(self.padding_batch(), like.device, non_blocking=True)
        return like.with_rows(like.view(copied).fields, 1, 0)

    def with_row_counts(self, batch: BatchView, row_counts: np.ndarray) -> Any:
        """Returns the batch with the row counts of its real rows, int64 `[samples, names]`."""
        names = self.rows.count_names
        if not names:
            return batch.batch
        padded = np.zeros((len(names), batch.num_rows), dtype=np.int64)
        padded[:, : len(row_counts)] = row_counts.T
        return batch.with_row_counts(dict(zip(names, padded, strict=True)))


class PlanGather:
    """Gathers row tables over a group; a failure on one rank is raised on all of them.

    The first call agrees on the schema, on a row for ranks without samples, and on the number of rows that a
    gather carries per rank. Every later one is a single all-gather of equal sizes. If a rank has more rows
    than any before, all ranks see that and gather once more.

    Args:
        channel: of the ranks; used by one thread at a time.
        settings: of the shuffler and its features, by name; they have to be the same on all ranks.
        view: returns the view of a batch.
        features: of the shuffler.

    Attributes:
        format: the outcome of the first batch; None before it.
    """

    def __init__(
        self,
        channel: Channel,
        settings: Mapping[str, str],
        view: Callable[[Any], BatchView],
        features: Sequence[Feature],
    ) -> None:
        self._channel, self._settings = channel, settings
        self._view, self._features = view, features
        self._capacity = 0  # rows that a gather carries per rank
        self.format: BatchFormat | None = None

    def gather(
        self, counted: Counted | None, failure: Exception | None, first_batch: Any, post: np.ndarray
    ) -> tuple[RowTable, np.ndarray]:
        """Gathers the rows of all ranks. Collective, also for ranks without a batch.

        Args:
            counted: this rank's rows; None if its loader has ended, or if `failure` is given.
            failure: the error that kept this rank from counting.
            first_batch: this rank's first batch, for the agreement.
            post: int64 `[num_posted]`, for the other ranks; as long on all of them.

        Returns:
            The rows of all ranks; int64 `[ranks, num_posted]`, what each rank posted.

        Raises:
            ValueError: batches of different ranks or steps differ in their fields, or ranks in their
                settings.
            Exception: the failure of the first rank that has one, on every rank.
        """
        if self.format is None:
            self._agree(counted, failure, first_batch, len(post))
        if self.format is None:  # no rank has ever had a batch
            num_ranks = self._channel.num_ranks
            return RowTable.empty(num_ranks), np.zeros((num_ranks, len(post)), dtype=np.int64)
        expected = self.format.rows
        if counted is not None and _columns(counted[1]) != _columns(expected):
            failure = failure or ValueError(f"a batch has {counted[1]}; the first one had {expected}")
            counted = None
        table = self._channel.all_gather(self._encode(counted, failure, expected, post))
        most = int(table[:, _FIRST].max())
        if most > self._capacity:
            self._capacity = most
            table = self._channel.all_gather(self._encode(counted, failure, expected, post))
        self._raise_if_any_failed(table, counted, failure, expected.schema)
        header = _FIRST + _SIZES + len(post)
        batch_sizes, num_loaded = table[:, _FIRST : _FIRST + _SIZES].T.copy()
        per_rank = table[:, header:].reshape(self._channel.num_ranks, self._capacity, -1)
        numbers = np.concatenate([rows[:real] for rows, real in zip(per_rank, num_loaded, strict=True)])
        rows = expected.decode(numbers, batch_sizes, num_loaded)
        return rows, table[:, _FIRST + _SIZES : header].copy()

    def _encode(
        self, counted: Counted | None, failure: Exception | None, expected: RowFormat, post: np.ndarray
    ) -> np.ndarray:
        """Returns this rank's part of the gather. It leaves out rows beyond the agreed number, which the
        others see from the header."""
        header = _FIRST + _SIZES + len(post)
        encoded = np.zeros(header + self._capacity * expected.width, dtype=np.int64)
        encoded[_FIRST + _SIZES : header] = post
        if counted is None:
            encoded[0] = _NO_BATCH if failure is None else _FAILED
            return encoded
        rows, row_format = counted
        encoded[:2] = _OK, row_format.schema.fingerprint
        encoded[_FIRST : _FIRST + _SIZES] = rows.batch_sizes[0], rows.num_loaded[0]
        if rows.batch_sizes[0] <= self._capacity and row_format.schema == expected.schema:
            numbers = expected.encode(rows).ravel()
            encoded[header : header + len(numbers)] = numbers
        return encoded

    def _agree(
        self, counted: Counted | None, failure: Exception | None, first_batch: Any, num_posted: int
    ) -> None:
        """Sets `format`, unless no rank has a batch."""
        mine, padding, pinned = None, None, False
        if counted is not None and failure is None:
            try:
                first = self._view(first_batch)
                pinned, on_host = first.is_pinned, self._view(first.to_host())
                padding = self._view(on_host.first_row())
                mine = self._offer(counted, on_host.batch, padding)
            except Exception as error:
                failure = error
        sent = mine, portable(failure), self._settings, num_posted
        offers, failed, settings, posts = zip(*self._channel.all_gather_objects(sent), strict=True)
        _check_same_settings(settings)
        for rank, num in enumerate(posts):
            if num != posts[0]:
                raise ValueError(
                    f"features of the ranks 0 and {rank} have restored different states; restore them on "
                    "every rank"
                )
        raise_first(failed, failure, self._channel.rank)
        ranks = [rank for rank, offer in enumerate(offers) if offer is not None]
        if not ranks:
            return
        agreed: _Offer = offers[ranks[0]]
        schemas = [None if offer is None else offer.rows.schema for offer in offers]
        _raise_if_different(agreed.rows.schema, f"rank {ranks[0]}", schemas)
        for rank in ranks:
            _check_same_offers(ranks[0], agreed, rank, offers[rank])
        if len(ranks) < len(offers):
            row = None if padding is None else padding.batch
            row = _broadcast(self._channel, ranks[0], row)
            padding = self._view(row) if padding is None else padding
        assert padding is not None
        if agreed.real_row is not None:
            padding = self._view(padding.with_rows(agreed.real_row, 1, 1))
        self._capacity = max(offers[rank].capacity for rank in ranks)
        self.format = BatchFormat(agreed.rows, padding, pinned, agreed.agreed)

    def _offer(self, counted: Counted, first_batch: Any, padding: BatchView) -> _Offer:
        rows, row_format = counted
        return _Offer(
            rows=row_format,
            capacity=int(rows.batch_sizes[0]),
            real_row=None if padding.pads else padding.fields,
            agreed={feature.name: feature.agree(first_batch, row_format) for feature in self._features},
        )

    def _raise_if_any_failed(
        self, table: np.ndarray, counted: Counted | None, failure: Exception | None, schema: RowSchema
    ) -> None:
        if (table[:, 0] == _FAILED).any():
            failures = self._channel.all_gather_objects(portable(failure))
            raise_first(failures, failure, self._channel.rank)
        differs = (table[:, 0] == _OK) & (table[:, 1] != schema.fingerprint)
        if differs.any():
            mine = None if counted is None else counted[1].schema
            _raise_if_different(schema, "the first batch", self._channel.all_gather_objects(mine))


def _columns(row_format: RowFormat) -> tuple[Any, ...]:
    return row_format.num_work, row_format.count_names, row_format.column_names


def _check_same_settings(settings: Sequence[Mapping[str, str]]) -> None:
    first = settings[0]
    for rank, rank_settings in enumerate(settings):
        for name in sorted(first.keys() | rank_settings.keys()):
            here, there = first.get(name, "absent"), rank_settings.get(name, "absent")
            if here != there:
                raise ValueError(
                    f"rank {rank}'s shuffler has {name}={there}, that of rank 0 {here}; all ranks need the "
                    "same settings"
                )


def _check_same_offers(first: int, agreed: _Offer, rank: int, offer: _Offer) -> None:
    for name, value in offer.agreed.items():
        if value != agreed.agreed[name]:
            raise ValueError(
                f"rank {rank}'s batch has {value} for {name}, that of rank {first} {agreed.agreed[name]}; "
                "all ranks need the same"
            )
    if _columns(offer.rows) != _columns(agreed.rows):
        raise ValueError(
            f"rank {rank} has a batch with {offer.rows}; rank {first} with {agreed.rows}. All ranks need the "
            "same shuffler and row_counts"
        )
    if (offer.real_row is None) != (agreed.real_row is None):
        raise ValueError(
            f"batches of rank {first} and rank {rank} are of different types, of which only one knows its "
            "padding rows; all ranks must have batches of one type"
        )


def _raise_if_different(expected: RowSchema, whose: str, schemas: Sequence[RowSchema | None]) -> None:
    for rank, schema in enumerate(schemas):
        difference = "" if schema is None else expected.difference(schema)
        if difference:
            raise ValueError(
                f"rank {rank} has a batch that differs from that of {whose}: {difference}; batches of all "
                "ranks and steps must have the same fields, keys, dtypes and trailing shapes"
            )


def _broadcast(channel: Channel, sender: int, batch: Any) -> Any:
    """Returns a batch of one rank on all of them; raises a TypeError on all if it does not pickle."""
    failure, pickled = None, None
    if channel.rank == sender:
        try:
            pickled = to_bytes(batch)
        except Exception as error:
            failure = TypeError(
                f"a batch of rank {sender} does not pickle ({error}), and a rank that has none yet needs it "
                "for its type and what its samples share; keep functions and handles out of batches"
            )
    gathered = channel.all_gather_objects((pickled, portable(failure)))
    raise_first([failed for _, failed in gathered], failure, channel.rank)
    return batch if channel.rank == sender else pickle.loads(gathered[sender][0])
