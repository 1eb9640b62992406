"""The planning gather: one collective that tells every rank about the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..sequence_batch.rows import Rows
from .batch_format import Format
from .channel import Channel, from_bytes, to_bytes
from .count_rows import Counted
from .extension import Extension
from .rank_facts import RankFacts, contents_of, warn_of_contents
from .row_table import RowTable


class PlanGather:
    """Gathers the rows of all ranks over a group, and raises a failure of one rank on all of them.

    In the first call, ranks agree on the format, and on the number of rows that a gather carries per rank.
    A later call takes one all-gather of equal sizes. If a rank has more rows, or wider numbers, all ranks
    make room and gather again. While some ranks have no batch, one more gather tells whether their spare rows
    are up to date.

    Args:
        channel, agrees: channels of the ranks whose rows are gathered, and of the ranks that agree on the
            format, which are the same or all ranks of the job.
        extensions: the shuffler's extensions.
        moves: whether samples may leave their ranks, so that ranks compare what stays behind.

    Attributes:
        format: the format that the ranks have agreed on. None before the first batch.
    """

    def __init__(
        self, channel: Channel, agrees: Channel, extensions: Sequence[Extension], moves: bool
    ) -> None:
        self._channel, self._agrees, self._extensions = channel, agrees, extensions
        self._moves, self._facts = moves, RankFacts(channel)
        self._capacity, self._is_wide = 0, False  # rows that a gather carries per rank, and their width
        self._spare: Rows | None = None
        self._is_pinned = False
        self.format: Format | None = None

    def gather(
        self, counted: Counted | None, failure: Exception | None, posts: np.ndarray
    ) -> tuple[RowTable, np.ndarray]:
        """Gathers the rows and the posts, `[ranks]`, of all ranks. Collective, even without a batch.

        Args:
            counted: this rank's rows. None means that its loader has ended, or that it has a `failure`.
            posts: numbers for the other ranks, `[1]`, with a field for each extension.

        Raises:
            ValueError: the formats of batches differ between ranks or steps.
            TypeError: a rank without a batch needs data of another rank's batch that does not pickle.
            Exception: the failure of the first rank that has one. Every rank raises it.
        """
        if self.format is None:
            self._agree(counted, failure, posts.dtype.itemsize)
        if self.format is None:  # no rank has ever had a batch
            num_ranks = self._channel.num_ranks
            return RowTable.empty(num_ranks), np.zeros(num_ranks, dtype=posts.dtype)
        facts = 0
        try:
            if counted is not None:
                self.format.check_same(None, self._channel.ranks[self._channel.rank], counted.format)
                facts = self._facts.hash_of(counted.batch) if self._moves else 0
        except Exception as error:
            failure = error
        messages = self._send(counted, failure, posts, facts)
        most, is_wide = int(messages["num_rows"].max()), bool(messages["is_wide"].any())
        if most > self._capacity or (is_wide and not self._is_wide):
            self._capacity, self._is_wide = max(most, self._capacity), is_wide or self._is_wide
            messages = self._send(counted, failure, posts, facts)
        if messages["failed"].any():
            self._channel.all_gather_objects(None, failure)
        has_batch = messages["num_rows"] > 0
        if len({*messages["facts"][has_batch].tolist()}) > 1:
            self._facts.compare(counted and counted.batch)
        if has_batch.any() and not has_batch.all():
            self._renew_spare(counted, has_batch)
        return self.format.table(messages), messages["posts"].copy()

    def spare_row(self) -> Rows:
        """Returns a copy of the row that this rank computes in a step without samples; see `_row_of`.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        if self._spare is None:
            raise RuntimeError("no rank of the group has had a batch yet, so its fields are unknown")
        row = self._spare.copy()  # a model may modify its input in place
        return row.pin_memory() if self._is_pinned else row

    def _send(
        self, counted: Counted | None, failure: Exception | None, posts: np.ndarray, facts: int
    ) -> np.ndarray:
        """Gathers the messages of all ranks. A message leaves out rows for which it has no room."""
        assert self.format is not None  # ranks have agreed
        sent = np.zeros(1, dtype=self.format.message(posts.dtype, self._capacity, self._is_wide))
        sent["failed"], sent["facts"], sent["posts"] = failure is not None, facts, posts
        if counted is not None and failure is None:
            sent["num_rows"], sent["num_real"] = counted.batch.num_rows, len(counted.numbers)
            sent["is_wide"] = counted.is_wide
            if counted.batch.num_rows <= self._capacity and counted.is_wide <= self._is_wide:
                sent["padding_lengths"] = counted.padding_lengths
                sent["rows"][0, : len(counted.numbers)] = counted.numbers
        return self._channel.all_gather(sent)[:, 0]

    def _agree(self, counted: Counted | None, failure: Exception | None, num_posted: int) -> None:
        """Agrees on the format with all ranks, and sets `format` unless no rank has a batch. Collective."""
        mine, contents, num_rows = None, None, 0
        if counted is not None:
            try:
                batch, num_rows = counted.batch.on_host(), counted.batch.num_rows
                self._spare, self._is_pinned = _row_of(counted), counted.batch.is_pinned
                agreed = {of.name: of.agree(batch.batch, counted.format) for of in self._extensions}
                contents = contents_of(batch) if self._moves else None
                mine = replace(counted.format, agreed=agreed)
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
        has_batch = np.array([of_rank is not None for of_rank in formats])
        if not has_batch.any():
            return
        first = int(has_batch.argmax())
        for rank in np.flatnonzero(has_batch).tolist():
            formats[first].check_same(names[first], names[rank], formats[rank])
        if self._channel.rank == 0:  # of the ranks that exchange, not of all that agree
            of_ranks = dict(zip(names, loaded, strict=True))
            warn_of_contents({rank: held for rank in self._channel.ranks if (held := of_ranks[rank])})
        if not has_batch.all():
            self._get_spare(agrees, counted, first)
        self._capacity, self.format = max(rows_of_each), formats[first]

    def _renew_spare(self, counted: Counted | None, has_batch: np.ndarray) -> None:
        """Replaces spare rows if what stays with a batch, such as shared tensors, has changed. Collective."""
        rows = self._spare if counted is None else counted.batch.on_host()
        rest = 0 if rows is None else rows.hash_of_rest()
        hashes, sender = self._channel.all_gather(np.array([rest]))[:, 0], int(has_batch.argmax())
        if (hashes[~has_batch] != hashes[sender]).any():
            self._get_spare(self._channel, counted, sender)

    def _get_spare(self, channel: Channel, counted: Counted | None, sender: int) -> None:
        """Replaces the spare row of a rank without a batch by one from the rank `sender`. Collective."""
        sent, failure = None, None
        if counted is not None and channel.rank == sender:
            try:
                sent = to_bytes(_row_of(counted))
            except Exception as error:
                failure = TypeError(
                    f"a batch of rank {channel.ranks[sender]} does not pickle ({error}), and a rank that has "
                    "none needs it for its type and what its samples share; keep functions and handles out "
                    "of batches"
                )
        sent = channel.all_gather_objects(sent, failure)[sender]
        if counted is None:
            self._spare = from_bytes(sent)


def _row_of(counted: Counted) -> Rows:
    """Returns a padding row if batches know it, or else the row with the fewest elements, on the host."""
    batch = counted.batch.on_host()
    elements = counted.numbers["key_lengths"].sum(1, dtype=np.int64)
    row = np.zeros(0, dtype=np.int64) if batch.pads else elements.argmin(keepdims=True)
    return batch.view(batch.select([batch.packed()], row, 1))
