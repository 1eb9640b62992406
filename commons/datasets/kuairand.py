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
from polars.io.plugins import register_io_source
from tqdm import tqdm

from .. import NAME
from ..delimited import Column, integer, read_blocks, read_table
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
_LOG_COLUMNS = (
    integer(USER_ID, 0),
    integer(VIDEO_ID, 0),
    integer(TIME, -(2**63)),
    *(integer(task, 0, 1) for task in TASKS),
)
_USER_COLUMNS = (integer(USER_ID, 0), *(Column(name, pl.col(name), "text") for name in USER_ATTRIBUTES))
_SEQUENCES_SCHEMA = pl.Schema(
    {
        **dict.fromkeys(_CONTEXTUAL, pl.Int32()),
        "items": pl.List(pl.Int32()),
        "actions": pl.List(pl.Int16()),
        "timestamps": pl.List(pl.Int64()),
    }
)
# Number of events sorted at a time. Each takes about 22 bytes, and processing takes a few times that.
HELD_EVENTS = 1 << 22
# Small enough that reading a range of users skips most of a run.
_ROW_GROUP = 1 << 15


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
            num_events = _write_runs(folder, logs, users, users_file)
            parts = list(_sorted_parts(folder, num_events, max_history_seqlen, held_events))
            # Ids are assigned last, because only videos of kept events have one.
            videos = pl.scan_parquet(parts).select(VIDEO_ID).unique().collect(engine="streaming")
            video_ids = np.sort(videos[VIDEO_ID].to_numpy())
            contextual = users.sort(USER_ID).select(pl.col(_CONTEXTUAL).rank("dense").cast(pl.Int32))
            _write_sequences(folder / SEQUENCES_FILE, parts, video_ids, contextual, held_events)
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


def _write_runs(folder: Path, logs: Sequence[Path], users: pl.DataFrame, users_file: Path) -> np.ndarray:
    """Writes each block of the logs to a file, called a run, sorted by user. Returns the events per user.

    Runs store a user as the index of its id among all sorted user ids. The result, `[users]`, has this order.
    """
    user_ids = np.sort(users[USER_ID].to_numpy())
    num_events = np.zeros(len(user_ids), dtype=np.int64)
    blocks = (block for path in logs for block in read_blocks(path, _LOG_COLUMNS))
    action = pl.sum_horizontal(pl.col(task) * 2**bit for bit, task in enumerate(TASKS)).cast(pl.Int16)
    with tqdm(
        total=sum(path.stat().st_size for path in logs),
        desc="read",
        unit="B",
        unit_scale=True,
        disable=None,  # no bar without a terminal
    ) as progress:
        for number, (block, values) in enumerate(blocks):
            events = values.select(USER_ID, VIDEO_ID, TIME, action.alias(ACTION))
            ids = events[USER_ID].to_numpy()
            rows = np.minimum(np.searchsorted(user_ids, ids), len(user_ids) - 1)
            unknown = np.flatnonzero(user_ids[rows] != ids)
            if len(unknown):
                row = int(unknown[0])
                raise block.malformed(row, f"{users_file} does not have user {ids[row]}")
            num_events += np.bincount(rows, minlength=len(num_events))
            run = events.with_columns(pl.Series(USER_ID, rows.astype(np.int32)))
            run.sort(USER_ID, maintain_order=True).write_parquet(
                folder / f"run-{number:06}.parquet", row_group_size=_ROW_GROUP, compression="lz4"
            )
            progress.update(block.num_bytes)
    if not num_events.any():
        raise ValueError(f"{', '.join(map(str, logs))}: there are no events")
    return num_events


def _sorted_parts(
    folder: Path, num_events: np.ndarray, max_history_seqlen: int | None, held_events: int
) -> Iterator[Path]:
    """Writes the kept events of each range of users to a file, sorted by user, then time, then tie key.

    Skips row groups of a run that are outside the range. Yields the path of each file.
    """
    runs = sorted(folder.glob("run-*.parquet"))
    total = int(num_events.sum())
    with tqdm(total=total, desc="sort", unit="event", unit_scale=True, disable=None) as progress:
        for first, last in _user_ranges(num_events, held_events):
            user_rows = pl.scan_parquet(runs).filter(pl.col(USER_ID).is_between(first, last))
            part = user_rows.collect()
            keys = tie_keys(*(part[name].to_numpy() for name in (USER_ID, VIDEO_ID)))
            part = part.with_columns(pl.Series("tie", keys))
            part = part.sort(USER_ID, TIME, "tie", VIDEO_ID, ACTION).drop("tie")
            progress.update(len(part))
            if max_history_seqlen is not None:
                part = part.filter(pl.int_range(pl.len()).reverse().over(USER_ID) < max_history_seqlen)
            path = folder / f"part-{first:09}.parquet"
            part.write_parquet(path, compression="lz4")
            yield path


def _user_ranges(num_events: np.ndarray, held_events: int) -> Iterator[tuple[int, int]]:
    """Yields the first and last user of each range. A range has at most `held_events` events, or one user.

    The ranges may leave out users without events.
    """
    ends = np.cumsum(num_events)
    first, before = 0, 0
    while before < ends[-1]:
        last = int(np.searchsorted(ends, before + held_events, side="right")) - 1
        # A single user may exceed the limit. Users skipped before it have no events.
        last = max(last, int(np.searchsorted(ends, before, side="right")))
        yield first, last
        first, before = last + 1, int(ends[last])


def _write_sequences(
    path: Path, parts: list[Path], video_ids: np.ndarray, contextual: pl.DataFrame, held_events: int
) -> None:
    """Writes one row per user. An item is 1 + the index of its video in `video_ids`."""
    num_events = pl.scan_parquet(parts).select(pl.len()).collect().item()

    def rows(*_: object) -> Iterator[pl.DataFrame]:
        with tqdm(total=num_events, desc="write", unit="event", unit_scale=True, disable=None) as progress:
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
                yield pl.concat([contextual[users[USER_ID]], users.drop(USER_ID)], how="horizontal")
                progress.update(len(part))

    # Only a query can write a file incrementally. The size of a row group counts users.
    row_group = max(1, held_events // max(1, num_events // len(contextual)))
    register_io_source(rows, schema=_SEQUENCES_SCHEMA).sink_parquet(path, row_group_size=row_group)
