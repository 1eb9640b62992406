"""The planning gather: one collective that tells every rank about the rows of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..sequence_batch.rows import Rows
from ..warn_once import warn_once
from .batch_format import Format
from .channel import Channel, from_bytes, to_bytes
from .extension import Extension
from .rank_facts import RankFacts, contents_of, warn_of_contents
from .row_table import RowTable

logger = logging.getLogger(__name__)
# A rank's message starts with a flag for failure, a hash of its batch's plain values, and its numbers of
# rows and real rows. The lengths of its padding, its posts, and its rows follow. Every batch has at least one
# row, so 0 rows mean that a rank has no batch.
_FAILED, _FACTS, _NUM_ROWS, _NUM_REAL, _HEADER = range(5)

# The rows of this rank's batch, their format, and the batch.
Counted = tuple[RowTable, Format, Rows]
View = Callable[[Any], Rows]


class PlanGather:
    """Gathers row tables over a group, and raises a failure of one rank on all of them.

    In the first call, ranks agree on the format, and on the number of rows that a gather carries per rank.
    A later call takes one all-gather of equal sizes. If a rank has more rows, all ranks grow that number
    and gather again. While some ranks have no batch, a gather and a broadcast renew the row that they run.

    Args:
        channel, agrees: channels of the ranks whose rows are gathered, and of the ranks that agree on the
            format, which are the same or all ranks of the job.
        extensions, view: the shuffler's extensions and its `view` method.
        moves: whether samples may leave their ranks, so that ranks compare what stays behind.
    """

    def __init__(
        self, channel: Channel, agrees: Channel, extensions: Sequence[Extension], view: View, moves: bool
    ) -> None:
        self._channel, self._agrees = channel, agrees
        self._view, self._extensions = view, extensions
        self._moves, self._facts = moves, RankFacts(channel)
        self._capacity = 0  # rows that a gather carries per rank
        self.format: Format | None = None

    def gather(
        self, counted: Counted | None, failure: Exception | None, post: np.ndarray
    ) -> tuple[RowTable, np.ndarray]:
        """Gathers the rows of all ranks. Collective, even for ranks without a batch.

        Args:
            counted: this rank's rows. None means that its loader has ended, or that it has a `failure`.
            post: numbers for the other ranks, int64 `[numbers]`.

        Returns:
            The rows of all ranks, and the posts of all ranks, int64 `[ranks, numbers]`.

        Raises:
            ValueError: the formats of batches differ between ranks or steps.
            Exception: the failure of the first rank that has one. Every rank raises it.
        """
        if self.format is None:
            self._agree(counted, failure, len(post))
        if self.format is None:  # no rank has ever had a batch
            num_ranks = self._channel.num_ranks
            return RowTable.empty(num_ranks), np.zeros((num_ranks, len(post)), dtype=np.int64)
        expected, facts = self.format, 0
        try:
            if counted is not None:
                facts = self._facts.hash_of(counted[2]) if self._moves else 0
                expected.check_same(None, self._channel.ranks[self._channel.rank], counted[1])
                if expected.batch_type is None:  # this rank had no batch when ranks agreed
                    self.format = expected = replace(expected, batch_type=type(counted[2].batch))
        except Exception as error:
            failure = error
        table = self._channel.all_gather(self._encode(counted, failure, expected, post, facts))
        most = int(table[:, _NUM_ROWS].max())
        if most > self._capacity:
            self._capacity = most
            table = self._channel.all_gather(self._encode(counted, failure, expected, post, facts))
        if table[:, _FAILED].any():
            self._channel.all_gather_objects(None, failure)
        has_batch = table[:, _NUM_ROWS] > 0
        if len({*table[has_batch, _FACTS].tolist()}) > 1:
            self._facts.compare(counted and counted[2])
        if has_batch.any() and not has_batch.all():
            self._renew_padding(int(has_batch.argmax()), counted)
        header = _HEADER + expected.schema.num_keys
        _, per_rank, posted, numbers = np.split(table, [_NUM_ROWS, header, header + len(post)], axis=1)
        rows_of_all = numbers.reshape(-1, expected.width)
        is_real = (np.arange(self._capacity) < table[:, _NUM_REAL, None]).ravel()
        real = rows_of_all if is_real.all() else rows_of_all[is_real]
        return expected.decode(real, per_rank), posted.copy()

    def _renew_padding(self, sender: int, counted: Counted | None) -> None:
        """Replaces the padding row with one from rank `sender`, which has a batch. Collective.

        Numbers and texts in batches, and tensors that samples share, may have changed since the first step.
        """
        pickled = None
        if counted is not None and self._channel.rank == sender:
            try:
                pickled = to_bytes(self._padding_of(counted).batch)
            except Exception as error:  # not raised, because others wait
                warn_once(
                    logger,
                    "ranks without a batch compute samples with the numbers and texts of an earlier step, "
                    f"because those of this step cannot be sent: {type(error).__name__}: {error}",
                )
        pickled = self._channel.broadcast(pickled, sender)
        if pickled is not None and self.format is not None:
            padding = self._with_real_row(self._view(from_bytes(pickled)), self.format)
            self.format = replace(self.format, padding=padding)

    def _encode(
        self,
        counted: Counted | None,
        failure: Exception | None,
        expected: Format,
        post: np.ndarray,
        facts: int,
    ) -> np.ndarray:
        """Returns this rank's message. It leaves out the rows themselves if they exceed the capacity."""
        before_post = _HEADER + expected.schema.num_keys
        header = before_post + len(post)
        encoded = np.zeros(header + self._capacity * expected.width, dtype=np.int64)
        encoded[_FAILED], encoded[_FACTS], encoded[before_post:header] = failure is not None, facts, post
        if counted is None or failure is not None:
            return encoded
        rows = counted[0]
        encoded[_NUM_ROWS:_HEADER] = rows.batch_sizes[0], rows.num_loaded[0]
        if rows.batch_sizes[0] <= self._capacity:
            encoded[_HEADER:before_post] = rows.padding_lengths[0]
            numbers = expected.encode(rows).ravel()
            encoded[header : header + len(numbers)] = numbers
        return encoded

    def _agree(self, counted: Counted | None, failure: Exception | None, num_posted: int) -> None:
        """Agrees on the format with all ranks, and sets `format` unless no rank has a batch. Collective."""
        mine, contents, padding, pinned, num_rows = None, None, None, False, 0
        if counted is not None:
            try:
                rows, row_format, batch = counted
                pinned, on_host, num_rows = batch.is_pinned, batch.on_host(), int(rows.batch_sizes[0])
                padding = self._padding_of(counted)
                mine = replace(
                    row_format,
                    real_row={} if padding.pads else padding.fields,
                    agreed={of.name: of.agree(on_host.batch, row_format) for of in self._extensions},
                )
                contents = contents_of(on_host) if self._moves else None
            except Exception as error:
                failure = error
        agrees, names = self._agrees, self._agrees.ranks
        sent = agrees.all_gather_objects((mine, num_rows, num_posted, contents), failure)
        formats, rows_of_each, posts, loaded = zip(*sent, strict=True)
        for rank, num in zip(names, posts, strict=True):
            if num != posts[0]:
                raise ValueError(
                    f"extensions of the ranks {names[0]} and {rank} have restored different states; restore "
                    "them on every rank"
                )
        ranks = [rank for rank, of_rank in enumerate(formats) if of_rank is not None]
        if not ranks:
            return
        first: Format = formats[ranks[0]]
        for rank in ranks:
            first.check_same(names[ranks[0]], names[rank], formats[rank])
        if self._channel.rank == 0:  # of the ranks that exchange, not of all that agree
            of_ranks = dict(zip(names, loaded, strict=True))
            warn_of_contents({rank: held for rank in self._channel.ranks if (held := of_ranks[rank])})
        if len(ranks) < len(formats):
            row = agrees.broadcast(None if padding is None else padding.batch, ranks[0])
            padding = self._view(row) if padding is None else padding
        if padding is not None:
            padding = self._with_real_row(padding, first)
        self._capacity = max(rows_of_each)
        batch_type = None if counted is None else type(counted[2].batch)
        self.format = replace(first, padding=padding, pinned=pinned, batch_type=batch_type)

    def _padding_of(self, counted: Counted) -> Rows:
        """Returns a padding row, or else a copy of the row with the fewest elements, on the host."""
        rows, _, batch = counted
        on_host, none = batch.on_host(), np.zeros(0, dtype=np.int64)
        row = none if batch.pads else rows.key_lengths.sum(1).argmin(keepdims=True)
        return self._view(on_host.select([on_host.packed()], row, 1))

    def _with_real_row(self, padding: Rows, agreed: Format) -> Rows:
        """Returns `padding`. If batches do not pad, its fields become those of the real row agreed on."""
        if agreed.pads:
            return padding
        return self._view(padding.replaced(dict(agreed.real_row), 1, 1).batch)
