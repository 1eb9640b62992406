"""Prepares KuaiRand for training: one row per user, with the user's events in order of time.

    python -m commons.datasets.kuairand_preprocess --dataset kuairand-1k [--raw DIR] [--out DIR]
        [--max-history-seqlen N]

Reads the official files, of which the standard logs are used, not the log of randomly exposed videos.
The output is `sequences.parquet`, sorted by user, with the contextual columns and the list columns
items, actions and timestamps (milliseconds), and `meta.json`. An action id is 1 + the event's bits:
is_click 1, is_like 2, is_follow 4, is_comment 8, is_forward 16, is_hate 32, long_view 64,
is_profile_enter 128. Events of equal time keep the order of the files. Users and their attributes become
ids from 1 in the order of the values in the users' file, and the videos of the events that are kept ids
from 1 in the order of theirs. Whole histories are kept, or the newest N events of each.

Memory is for some million events and one id per video, whatever the size of the files; meanwhile the
events are on disk, in the output folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source
from tqdm import tqdm

from commons.datasets.kuairand_format import (
    ACTION,
    FORMATS,
    TASKS,
    TIME,
    USER_ATTRIBUTES,
    USER_ID,
    VIDEO_ID,
    KuaiRandFormat,
    find_raw_files,
    read_log,
    read_users,
)
from commons.datasets.user_events import HELD_EVENTS, UserEvents
from commons.datasets.user_sequences import META_FILE, SEQUENCES_FILE, SequencesMeta

_CONTEXTUAL = (USER_ID, *USER_ATTRIBUTES)
_SCHEMA = pl.Schema(
    {
        **dict.fromkeys(_CONTEXTUAL, pl.Int32()),
        "items": pl.List(pl.Int32()),
        "actions": pl.List(pl.Int16()),
        "timestamps": pl.List(pl.Int64()),
    }
)


def preprocess(
    kuairand: KuaiRandFormat,
    raw_dir: Path,
    out_dir: Path,
    max_history_seqlen: int | None = None,
    held_events: int = HELD_EVENTS,
) -> SequencesMeta:
    """Writes a dataset's `sequences.parquet` and `meta.json` to `out_dir`.

    Args:
        kuairand: which dataset.
        raw_dir: the folder with the official files, or the one above, in which it is called `data`.
        out_dir: made if need be; what an earlier run wrote there stays until this one is complete.
        max_history_seqlen: the newest events of each user that are kept; None for all.
        held_events: how many events to hold in memory.

    Raises:
        FileNotFoundError: raw files are absent.
        ValueError: a raw file is malformed, or `max_history_seqlen` is not positive.
    """
    if max_history_seqlen is not None and max_history_seqlen < 1:
        raise ValueError(f"max_history_seqlen = {max_history_seqlen}: expected at least 1")
    logs, users_file = find_raw_files(raw_dir, kuairand)
    users = read_users(users_file)
    unfinished = out_dir / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir(parents=True)
    try:
        events = UserEvents(unfinished, len(users), USER_ID, held_events)
        _read_logs(logs, users, users_file, events)
        histories = _Histories(unfinished, events, max_history_seqlen)
        contextual = users.sort(USER_ID).select(pl.col(_CONTEXTUAL).rank("dense").cast(pl.Int32))
        _write_sequences(unfinished / SEQUENCES_FILE, histories, contextual, held_events)
        meta = _meta(kuairand, contextual, len(histories.videos))
        meta.write(unfinished / META_FILE)
        # The meta file last: without it, what an interrupted run has left does not open.
        (out_dir / META_FILE).unlink(missing_ok=True)
        for name in (SEQUENCES_FILE, META_FILE):
            (unfinished / name).replace(out_dir / name)
    finally:
        shutil.rmtree(unfinished)
    return meta


def _read_logs(logs: Sequence[Path], users: pl.DataFrame, users_file: Path, events: UserEvents) -> None:
    """Adds all events, with users as their row in the order of user ids."""
    user_ids = np.sort(users[USER_ID].to_numpy())
    num_bytes = sum(path.stat().st_size for path in logs)
    with tqdm(total=num_bytes, desc="read", unit="B", unit_scale=True) as progress:
        for path in logs:
            for block in read_log(path):
                ids = block.events[USER_ID].to_numpy()
                rows = np.minimum(np.searchsorted(user_ids, ids), len(user_ids) - 1)
                unknown = np.flatnonzero(user_ids[rows] != ids)
                if len(unknown):
                    line = block.first_line + unknown[0]
                    raise ValueError(
                        f"{path}, line {line}: {users_file} does not have user {ids[unknown[0]]}"
                    )
                events.add(block.events.with_columns(pl.Series(USER_ID, rows.astype(np.int32))))
                progress.update(block.num_bytes)
        progress.update(num_bytes - progress.n)  # the headers
    if not events.num_events.any():
        raise ValueError(f"{', '.join(map(str, logs))}: there are no events")


class _Histories:
    """Sorted events in files, cut to the newest of each user.

    Args:
        directory: of the files.
        events: of all users.
        longest: of a user's events that are kept, or None.

    Attributes:
        videos: ids that are kept, ascending.
        num_events: that are kept.
    """

    def __init__(self, directory: Path, events: UserEvents, longest: int | None) -> None:
        self._parts: list[Path] = []
        self.num_events = 0
        videos = _DistinctIds()
        total = int(events.num_events.sum())
        with tqdm(total=total, desc="sort", unit="event", unit_scale=True) as progress:
            for part in events.in_order(TIME):
                progress.update(len(part))
                if longest is not None:
                    part = part.filter(pl.int_range(pl.len()).reverse().over(USER_ID) < longest)
                videos.add(part[VIDEO_ID].to_numpy())
                self.num_events += len(part)
                self._parts.append(directory / f"part-{len(self._parts):06}.parquet")
                part.write_parquet(self._parts[-1], compression="lz4")
        self.videos = videos.ascending()

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """A row per user: the user's row, items, actions and timestamps."""
        for path in self._parts:
            part = pl.read_parquet(path)
            items = np.searchsorted(self.videos, part[VIDEO_ID].to_numpy()) + 1
            yield (
                part.with_columns(pl.Series(VIDEO_ID, items.astype(np.int32)))
                .group_by(USER_ID, maintain_order=True)
                .agg(
                    pl.col(VIDEO_ID).alias("items"),
                    (pl.col(ACTION) + 1).alias("actions"),
                    pl.col(TIME).alias("timestamps"),
                )
            )


class _DistinctIds:
    """The distinct ones of many ids; takes memory for a few times them, not for all."""

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int64)
        self._added: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> None:
        """Takes `[ids]` int64."""
        self._added.append(np.unique(ids))
        # Merged only when they are as many as before, so that the last merge costs as much as all others.
        if sum(map(len, self._added)) > len(self._ids):
            self._merge()

    def ascending(self) -> np.ndarray:
        """All distinct ids, sorted."""
        self._merge()
        return self._ids

    def _merge(self) -> None:
        ids = np.concatenate([self._ids, *self._added])
        self._added.clear()
        ids.sort()
        is_first = np.ones(len(ids), dtype=bool)
        is_first[1:] = ids[1:] != ids[:-1]
        self._ids = ids[is_first]


def _write_sequences(path: Path, histories: _Histories, contextual: pl.DataFrame, held_events: int) -> None:
    def rows(*_: object) -> Iterator[pl.DataFrame]:
        with tqdm(total=histories.num_events, desc="write", unit="event", unit_scale=True) as progress:
            for users in histories:
                yield pl.concat([contextual[users[USER_ID]], users.drop(USER_ID)], how="horizontal")
                progress.update(int(users["items"].list.len().sum()))

    # Polars writes a file piece by piece only from a query. Its row groups are so many users.
    mean_events = max(1, histories.num_events // len(contextual))
    row_group = max(1, held_events // mean_events)
    register_io_source(rows, schema=_SCHEMA).sink_parquet(path, row_group_size=row_group)


def _meta(kuairand: KuaiRandFormat, contextual: pl.DataFrame, num_videos: int) -> SequencesMeta:
    largest = contextual.max().row(0, named=True)
    largest |= {VIDEO_ID: num_videos, ACTION: 2 ** len(TASKS)}
    return SequencesMeta(
        dataset=kuairand.dataset,
        contextual_feature_names=list(_CONTEXTUAL),
        item_feature_name=VIDEO_ID,
        action_feature_name=ACTION,
        vocab_sizes={name: largest_id + 1 for name, largest_id in largest.items()},
        num_classes=2 ** len(TASKS),
        positive_class=None,
        num_tasks=len(TASKS),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; an error becomes one line and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="python -m commons.datasets.kuairand_preprocess",
        description="Prepares a KuaiRand dataset for training.",
    )
    parser.add_argument("--dataset", required=True, choices=list(FORMATS))
    parser.add_argument("--raw", type=Path, help="folder of the official files (data/DATASET/raw)")
    parser.add_argument("--out", type=Path, help="folder to write to (data/DATASET)")
    parser.add_argument(
        "--max-history-seqlen", type=int, metavar="N", help="keep each user's newest N events (all)"
    )
    options = parser.parse_args(arguments)
    default = Path("data") / options.dataset
    out_dir = options.out or default
    raw_dir = options.raw or default / "raw"
    try:
        preprocess(FORMATS[options.dataset], raw_dir, out_dir, options.max_history_seqlen)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{options.dataset} is in {out_dir}")


if __name__ == "__main__":
    main()
