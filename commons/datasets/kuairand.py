"""KuaiRand: conversion of the official files to users' sequences, in bounded memory.

Gao et al., "KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos",
CIKM 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl
from pyarrow.parquet import ParquetWriter
from tqdm import tqdm

from .. import NAME
from ..delimited import Column, integer, read_batches, read_table
from .prepared_dataset import (
    META_FILE,
    SEQUENCES_FILE,
    TIE_ORDER,
    PreparedDataset,
    check_one_line_per_user,
    register_formats,
    tie_keys,
)
from .prepared_files import check_folder, raw_file, replaced_files
from .user_sequences import SequencesMeta

PAGE_URL = "https://kuairand.com"
USER_ID, VIDEO_ID, TIME, ACTION = "user_id", "video_id", "time_ms", "action"
# Task t of an event is bit t of its action.
TASKS = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)
USER_ATTRIBUTES = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)
_CONTEXTUAL = (USER_ID, *USER_ATTRIBUTES)
_USER_COLUMNS = (integer(USER_ID, 0), *(Column(name, pl.col(name), "text") for name in USER_ATTRIBUTES))
_EVENTS_SCHEMA = pl.Schema({USER_ID: pl.Int32(), VIDEO_ID: pl.Int64(), TIME: pl.Int64(), ACTION: pl.Int16()})
_SEQUENCES_SCHEMA = pl.Schema(
    {
        **dict.fromkeys(_CONTEXTUAL, pl.Int32()),
        "items": pl.List(pl.Int32()),
        "actions": pl.List(pl.Int16()),
        "timestamps": pl.List(pl.Int64()),
    }
)
# Number of events sorted at a time. Each takes 22 bytes, and sorting takes a few times that.
HELD_EVENTS = 3 << 20


class KuaiRand(PreparedDataset):
    """One KuaiRand dataset.

    Uses only the standard logs. The log of randomly exposed videos is for unbiased evaluation, and does not
    show what users saw in their feeds.

    Attributes:
        archive_folder: folder that the official archive unpacks to.
        log_parts: file name suffixes of each period's log, which may consist of several files.
    """

    preprocessor = f"{NAME}.datasets.kuairand_preprocess"
    archive_folder: ClassVar[str]
    log_parts: ClassVar[tuple[str, ...]] = ("",)

    def prepare(
        self,
        raw_dir: Path,
        out_dir: Path,
        max_history_seqlen: int | None = None,
        held_events: int = HELD_EVENTS,
    ) -> SequencesMeta:
        """Converts the official files to `sequences.parquet` and `meta.json`.

        Args:
            raw_dir: folder with the official files, or with the folder that the official archive unpacks to.
                The files may be compressed by gzip.
            out_dir: output folder, created if absent. An earlier run's files stay until this run is complete.
            max_history_seqlen: number of newest events to keep per user. None means all.
            held_events: number of events to hold in memory.

        Raises:
            OSError: raw files are missing, or a file, link, or folder is in the way of an output.
            ValueError: a raw file is malformed, or `max_history_seqlen` is not positive.
        """
        if max_history_seqlen is not None and max_history_seqlen < 1:
            raise ValueError(f"max_history_seqlen = {max_history_seqlen}: expected at least 1")
        logs, users_file = self._raw_files(raw_dir)
        users = read_table(users_file, _USER_COLUMNS)
        check_one_line_per_user(users_file, users[USER_ID], first_line=2)
        with replaced_files(out_dir, (SEQUENCES_FILE, META_FILE), [*logs, users_file]) as folder:
            num_events = _write_events(folder / "events.parquet", logs, users, users_file)
            parts = list(_sorted_parts(folder, num_events, max_history_seqlen, held_events))
            # Ids are assigned last, because only videos of kept events have one.
            videos = pl.scan_parquet(parts).select(VIDEO_ID).unique().collect(engine="streaming")
            video_ids = np.sort(videos[VIDEO_ID].to_numpy())
            contextual = users.sort(USER_ID).select(pl.col(_CONTEXTUAL).rank("dense").cast(pl.Int32))
            _write_sequences(folder / SEQUENCES_FILE, parts, video_ids, contextual)
            meta = self._meta(contextual, len(video_ids))
            meta.write(folder / META_FILE)
        return meta

    def _raw_files(self, raw_dir: Path) -> tuple[list[Path], Path]:
        """Returns the log files in order of time, and the users' file."""
        version = self.name.removeprefix("kuairand-")
        periods = ("4_08_to_4_21", "4_22_to_5_08")
        logs = [f"log_standard_{period}_{version}{part}.csv" for period in periods for part in self.log_parts]
        users = f"user_features_{version}.csv"
        check_folder(raw_dir, "--raw")
        archive = raw_dir / self.archive_folder
        folders = (raw_dir, raw_dir / "data", archive, archive / "data")
        found = {name: raw_file(folders, name) for name in (*logs, users)}
        absent = [name for name, path in found.items() if path is None]
        if absent:
            raise FileNotFoundError(
                f"{raw_dir} does not have {', '.join(absent)}; put the official archive's files there, which "
                f"{PAGE_URL} has"
            )
        *found_logs, found_users = (path for path in found.values() if path is not None)
        return found_logs, found_users

    def _meta(self, contextual: pl.DataFrame, num_videos: int) -> SequencesMeta:
        largest = contextual.max().row(0, named=True)
        largest |= {VIDEO_ID: num_videos, ACTION: 2 ** len(TASKS)}
        return SequencesMeta(
            dataset=self.name,
            contextual_feature_names=list(_CONTEXTUAL),
            item_feature_name=VIDEO_ID,
            action_feature_name=ACTION,
            vocab_sizes={name: largest_id + 1 for name, largest_id in largest.items()},
            num_classes=2 ** len(TASKS),
            positive_class=None,
            num_tasks=len(TASKS),
            tie_order=TIE_ORDER,
        )


KUAIRAND = register_formats(
    KuaiRand,
    {
        "kuairand-pure": {"archive_folder": "KuaiRand-Pure"},  # the 7,583 videos of the candidate pool
        "kuairand-1k": {"archive_folder": "KuaiRand-1K"},  # 1,000 users
        "kuairand-27k": {"archive_folder": "KuaiRand-27K", "log_parts": ("_part1", "_part2")},
    },
)


def _write_events(path: Path, logs: Sequence[Path], users: pl.DataFrame, users_file: Path) -> np.ndarray:
    """Writes the events of all logs to one file, in order. Returns the number of events per user, `[users]`.

    The file stores a user as the index of its id among all sorted user ids, which orders the result, too.
    """
    user_ids = users[USER_ID].sort()
    user, indices = pl.col(USER_ID).cast(pl.Int64, strict=False), range(len(user_ids))
    index = user.replace_strict(user_ids, indices, default=None, return_dtype=pl.Int32)
    columns = (
        Column(USER_ID, index, f"a user of {users_file}"),
        integer(VIDEO_ID, 0),
        integer(TIME, -(2**63)),
        *(integer(task, 0, 1) for task in TASKS),
    )
    action = pl.sum_horizontal(pl.col(task) * 2**bit for bit, task in enumerate(TASKS)).cast(pl.Int16)
    num_events = np.zeros(len(user_ids), dtype=np.int64)
    with _writer(path, _EVENTS_SCHEMA) as writer, _progress("read") as progress:
        for log in logs:
            for batch in read_batches(log, columns):
                events = batch.select(USER_ID, VIDEO_ID, TIME, action.alias(ACTION))
                num_events += np.bincount(events[USER_ID].to_numpy(), minlength=len(num_events))
                writer.write_table(events.to_arrow())
                progress.update(len(events))
    if not num_events.any():
        raise ValueError(f"{', '.join(map(str, logs))}: there are no events")
    return num_events


def _progress(stage: str, num_events: int | None = None) -> tqdm:
    """Returns a progress bar of events, which does nothing without a terminal."""
    return tqdm(total=num_events, desc=stage, unit="event", unit_scale=True, disable=None)


def _writer(path: Path, schema: pl.Schema) -> ParquetWriter:
    """Returns a writer of one row group per table."""
    return ParquetWriter(path, pl.DataFrame(schema=schema).to_arrow().schema, compression="lz4")


def _sorted_parts(
    folder: Path, num_events: np.ndarray, max_history_seqlen: int | None, held_events: int
) -> Iterator[Path]:
    """Writes the kept events of each range of users to a file, sorted by user, then time, then tie key.

    A range has `held_events` events, and what its last user has beyond them. Each range reads all events once
    more, and keeps its own. Yields the path of each file.
    """
    events = pl.scan_parquet(folder / "events.parquet")
    range_of_user = (np.cumsum(num_events) - num_events) // held_events
    with _progress("sort", int(num_events.sum())) as progress:
        for number in np.unique(range_of_user[num_events > 0]):
            first, last = (int(user) for user in np.flatnonzero(range_of_user == number)[[0, -1]])
            part = events.filter(pl.col(USER_ID).is_between(first, last)).collect(engine="streaming")
            keys = tie_keys(*(part[name].to_numpy() for name in (USER_ID, VIDEO_ID)))
            part = part.with_columns(pl.Series("tie", keys))
            part = part.sort(USER_ID, TIME, "tie", VIDEO_ID, ACTION).drop("tie")
            progress.update(len(part))
            if max_history_seqlen is not None:
                part = part.filter(pl.int_range(pl.len()).reverse().over(USER_ID) < max_history_seqlen)
            path = folder / f"part-{first:09}.parquet"
            part.write_parquet(path, compression="lz4")
            yield path


def _write_sequences(path: Path, parts: list[Path], video_ids: np.ndarray, contextual: pl.DataFrame) -> None:
    """Writes one row per user. An item is 1 + the index of its video in `video_ids`."""
    with _writer(path, _SEQUENCES_SCHEMA) as writer, _progress("write") as progress:
        for part_path in parts:
            part = pl.read_parquet(part_path)
            items = np.searchsorted(video_ids, part[VIDEO_ID].to_numpy()) + 1
            users = (
                part.with_columns(pl.Series(VIDEO_ID, items.astype(np.int32)))
                .group_by(USER_ID, maintain_order=True)
                .agg(
                    pl.col(VIDEO_ID).alias("items"),
                    (pl.col(ACTION) + 1).alias("actions"),
                    pl.col(TIME).alias("timestamps"),
                )
            )
            rows = pl.concat([contextual[users[USER_ID]], users.drop(USER_ID)], how="horizontal")
            writer.write_table(rows.to_arrow())
            progress.update(len(part))
