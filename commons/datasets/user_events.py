"""Sorting events by user and time that are too many for memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

# Events held at a time, of about 22 bytes; what is done with them takes a few times that.
HELD_EVENTS = 1 << 22
# Small enough to skip most of a run that is of other users.
_ROW_GROUP = 1 << 16


class UserEvents:
    """Events on disk, added in any order and read by ranges of users.

    Events are collected up to `held_events`, sorted by user and written to a file, a run. As a run is in
    order of users, a range of them is read from all runs without reading the rest.

    Args:
        directory: an empty one, for the runs.
        num_users: users are 0 to this, exclusive.
        user: the column with the user; the other columns are as the first events have them.
        held_events: how many to hold in memory.
    """

    def __init__(self, directory: Path, num_users: int, user: str, held_events: int = HELD_EVENTS) -> None:
        self._directory = directory
        self._user = user
        self._held_events = held_events
        self._pending: list[pl.DataFrame] = []
        self._runs: list[Path] = []
        self.num_events = np.zeros(num_users, dtype=np.int64)  # [users]

    def add(self, events: pl.DataFrame) -> None:
        """Adds events."""
        self.num_events += np.bincount(events[self._user].to_numpy(), minlength=len(self.num_events))
        self._pending.append(events)
        if sum(map(len, self._pending)) >= self._held_events:
            self._write_run()

    def in_order(self, time: str) -> Iterator[pl.DataFrame]:
        """All events by user and the column `time`, those of equal time as they were added.

        Yields:
            Events of whole users, together at most `held_events`, or else of a single user.
        """
        if self._pending:
            self._write_run()
        for first, last in self._ranges():
            of_range = pl.scan_parquet(self._runs).filter(pl.col(self._user).is_between(first, last))
            yield of_range.collect().sort(self._user, time, maintain_order=True)

    def _write_run(self) -> None:
        path = self._directory / f"run-{len(self._runs):06}.parquet"
        run = pl.concat(self._pending).sort(self._user, maintain_order=True)
        self._pending.clear()
        run.write_parquet(path, row_group_size=_ROW_GROUP, compression="lz4")
        self._runs.append(path)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """First and last user of each range; users without events may be in none."""
        ends = np.cumsum(self.num_events)
        first, before = 0, 0
        while before < ends[-1]:
            last = int(np.searchsorted(ends, before + self._held_events, side="right")) - 1
            # A single user may be above the limit; those before it without events do not matter.
            last = max(last, int(np.searchsorted(ends, before, side="right")))
            yield first, last
            first, before = last + 1, int(ends[last])
