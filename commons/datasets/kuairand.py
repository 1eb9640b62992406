"""KuaiRand: the official files, and converting them to users' sequences in bounded memory.

Gao et al., "KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos",
CIKM 2022.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import ClassVar, NoReturn

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source
from tqdm import tqdm

from .. import NAME
from .prepared_files import replaced_files
from .user_sequences import (
    META_FILE,
    SEQUENCES_FILE,
    DatasetFactory,
    PreparedDataset,
    SequencesMeta,
)

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
LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,"
    "long_view,play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
_CONTEXTUAL = (USER_ID, *USER_ATTRIBUTES)
_FLAGS = (*TASKS, "is_rand")
_IDS = (USER_ID, VIDEO_ID)
# The last column tells whether a line is complete, because polars fills up short ones with nulls.
_COMPLETE = (*_IDS, TIME, *_FLAGS, "tab")
# The other columns are unused. They only have to be numbers, or empty.
_LOG_TYPES = {name: pl.Int64 if name in _COMPLETE else pl.Float64 for name in LOG_HEADER.split(",")}
_SEQUENCES_SCHEMA = pl.Schema(
    {
        **dict.fromkeys(_CONTEXTUAL, pl.Int32()),
        "items": pl.List(pl.Int32()),
        "actions": pl.List(pl.Int16()),
        "timestamps": pl.List(pl.Int64()),
    }
)
# Events sorted at a time, about 22 bytes each; processing takes a few times that.
HELD_EVENTS = 1 << 22
_BLOCK_BYTES = 1 << 26
# Small enough that reading a range of users skips most of a run.
_ROW_GROUP = 1 << 15


class KuaiRand(PreparedDataset):
    """One KuaiRand dataset.

    Only the standard logs are used. The log of randomly exposed videos is for unbiased evaluation, and does
    not show what users saw in their feeds.

    Attributes:
        name: the dataset's name.
        log_parts: suffixes of the files that each period's log is split into.
    """

    preprocessor = f"{NAME}.datasets.kuairand_preprocess"
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
            raw_dir: folder with the files, or the one above it if they are in its folder `data`.
            out_dir: created if absent. An earlier run's files stay until this run is complete.
            max_history_seqlen: number of newest events to keep per user; None for all.
            held_events: number of events to hold in memory.

        Raises:
            FileNotFoundError: raw files are missing.
            FileExistsError: a raw file, a link or a folder has the name of a file to write.
            ValueError: a raw file is malformed, or `max_history_seqlen` is not positive.
        """
        if max_history_seqlen is not None and max_history_seqlen < 1:
            raise ValueError(f"max_history_seqlen = {max_history_seqlen}: expected at least 1")
        logs, users_file = self._raw_files(raw_dir)
        users = _read_users(users_file)
        with replaced_files(out_dir, (SEQUENCES_FILE, META_FILE), [*logs, users_file]) as folder:
            num_events = _write_runs(folder, logs, users, users_file)
            parts = list(_sorted_parts(folder, num_events, max_history_seqlen, held_events))
            # Ids are taken last, because only videos of kept events have one.
            videos = pl.scan_parquet(parts).select(VIDEO_ID).unique().collect(engine="streaming")
            video_ids = np.sort(videos[VIDEO_ID].to_numpy())
            contextual = users.sort(USER_ID).select(pl.col(_CONTEXTUAL).rank("dense").cast(pl.Int32))
            _write_sequences(folder / SEQUENCES_FILE, parts, video_ids, contextual, held_events)
            meta = self._meta(contextual, len(video_ids))
            meta.write(folder / META_FILE)
        return meta

    def _raw_files(self, raw_dir: Path) -> tuple[list[Path], Path]:
        """Returns the logs in order of time, and the users' file."""
        version = self.name.removeprefix("kuairand-")
        periods = ("4_08_to_4_21", "4_22_to_5_08")
        logs = [f"log_standard_{period}_{version}{part}.csv" for period in periods for part in self.log_parts]
        users = f"user_features_{version}.csv"
        folder = raw_dir / "data" if (raw_dir / "data").is_dir() else raw_dir
        absent = [name for name in (*logs, users) if not (folder / name).is_file()]
        if absent:
            raise FileNotFoundError(
                f"{folder} does not have {', '.join(absent)}; put the official archive's files there, which "
                f"{PAGE_URL} has"
            )
        return [folder / name for name in logs], folder / users

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
        )


class KuaiRandPure(KuaiRand):
    """27,285 users and the 7,583 videos of the candidate pool."""

    name = "kuairand-pure"


class KuaiRand1K(KuaiRand):
    """1,000 users and all videos they saw."""

    name = "kuairand-1k"


class KuaiRand27K(KuaiRand):
    """27,285 users and all videos they saw."""

    name = "kuairand-27k"
    log_parts = ("_part1", "_part2")


KUAIRAND: dict[str, type[KuaiRand]] = {
    kuairand.name: kuairand for kuairand in (KuaiRandPure, KuaiRand1K, KuaiRand27K)
}
for _name, _kuairand in KUAIRAND.items():
    DatasetFactory.register(_name, _kuairand)


def _read_users(path: Path) -> pl.DataFrame:
    """Reads users in file order: an Int64 column user_id, and the attributes as strings, maybe empty.

    Raises:
        ValueError: a line is malformed, or a user has two lines. Names the file and the line.
    """
    header, *lines = path.read_text(encoding="latin-1").split("\n")
    columns = _fields(header)
    if not set(_CONTEXTUAL) <= set(columns):
        raise ValueError(f"{path}, line 1: expected a header with the columns {', '.join(_CONTEXTUAL)}")
    if lines and not lines[-1]:
        lines.pop()  # split's empty string after the last newline
    users: dict[int, list[str]] = {}
    for number, line in enumerate(lines, 2):
        values = _fields(line)
        fields = dict(zip(columns, values, strict=False))
        user = fields.get(USER_ID, "")
        if len(values) != len(columns) or not _is_id(user) or int(user) in users:
            expected = f"expected {len(columns)} columns, user_id an id from 0, one line per user"
            raise ValueError(f"{path}, line {number}: {line!r}, {expected}")
        users[int(user)] = [fields[name] for name in USER_ATTRIBUTES]
    if not users:
        raise ValueError(f"{path} has no users")
    attributes = dict(zip(USER_ATTRIBUTES, zip(*users.values(), strict=True), strict=True))
    types = {USER_ID: pl.Int64, **dict.fromkeys(USER_ATTRIBUTES, pl.String)}
    return pl.DataFrame({USER_ID: list(users), **attributes}, schema=types)


def _fields(line: str) -> list[str]:
    """Splits a line of the users' file, which quotes ranges like "(10,50]"; [] if it is malformed."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _is_id(field: str) -> bool:
    return field.isascii() and field.isdecimal() and int(field) < 2**63


def _read_log(path: Path) -> Iterator[tuple[int, int, pl.DataFrame]]:
    """Reads a log block by block, so memory does not grow with the file.

    Yields:
        Line number of the block's first event, bytes of the block, and its events in file order: Int64
        columns user_id, video_id and time_ms, and action, Int16, bits of `TASKS`.

    Raises:
        ValueError: a line is malformed. Names the file and the line.
    """
    with path.open("rb") as file:
        if file.readline().rstrip(b"\r\n") != LOG_HEADER.encode():
            raise ValueError(f"{path}, line 1: expected the header {LOG_HEADER!r}")
        first_line = 2
        while text := file.read(_BLOCK_BYTES):
            text += file.readline()
            events = _parse(text)
            if events is None:
                _raise_malformed(path, first_line, text)
            yield first_line, len(text), events
            first_line += len(events)


def _parse(text: bytes) -> pl.DataFrame | None:
    """Parses lines of a log; None if any of them is malformed."""
    try:
        table = pl.read_csv(BytesIO(text), has_header=False, schema=_LOG_TYPES, quote_char=None)
    except pl.exceptions.PolarsError:
        return None
    is_valid = pl.all_horizontal(
        pl.col(_COMPLETE).is_not_null(), pl.col(_IDS) >= 0, pl.col(_FLAGS).is_between(0, 1)
    )
    num_lines = text.count(b"\n") + (not text.endswith(b"\n"))
    if len(table) != num_lines or not table.select(is_valid.all()).item():
        return None
    action = pl.sum_horizontal(pl.col(task) * 2**bit for bit, task in enumerate(TASKS))
    return table.select(USER_ID, VIDEO_ID, TIME, action.cast(pl.Int16).alias(ACTION))


def _raise_malformed(path: Path, first_line: int, text: bytes) -> NoReturn:
    """Finds the malformed line by bisection, because only `_parse` knows what is malformed."""
    lines = text.removesuffix(b"\n").split(b"\n")
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        if _parse(b"\n".join(lines[low:middle]) + b"\n") is None:
            high = middle
        else:
            low = middle
    line = lines[low].removesuffix(b"\r").decode("latin-1")
    expected = f"expected {LOG_HEADER!r}: numbers, of which {', '.join(_FLAGS)} are 0 or 1"
    raise ValueError(f"{path}, line {first_line + low}: {line!r}, {expected}")


def _write_runs(folder: Path, logs: Sequence[Path], users: pl.DataFrame, users_file: Path) -> np.ndarray:
    """Writes each block of the logs to a file, a run, sorted by user; returns `[users]` numbers of events.

    Runs hold each user as the row of its id among all sorted user ids.
    """
    user_ids = np.sort(users[USER_ID].to_numpy())
    num_events = np.zeros(len(user_ids), dtype=np.int64)
    blocks = ((path, *block) for path in logs for block in _read_log(path))
    with tqdm(
        total=sum(path.stat().st_size for path in logs),
        desc="read",
        unit="B",
        unit_scale=True,
        disable=None,  # where there is no terminal
    ) as progress:
        for number, (path, first_line, num_bytes, events) in enumerate(blocks):
            ids = events[USER_ID].to_numpy()
            rows = np.minimum(np.searchsorted(user_ids, ids), len(user_ids) - 1)
            unknown = np.flatnonzero(user_ids[rows] != ids)
            if len(unknown):
                line, user = first_line + unknown[0], ids[unknown[0]]
                raise ValueError(f"{path}, line {line}: {users_file} does not have user {user}")
            num_events += np.bincount(rows, minlength=len(num_events))
            run = events.with_columns(pl.Series(USER_ID, rows.astype(np.int32)))
            run.sort(USER_ID, maintain_order=True).write_parquet(
                folder / f"run-{number:06}.parquet", row_group_size=_ROW_GROUP, compression="lz4"
            )
            progress.update(num_bytes)
    if not num_events.any():
        raise ValueError(f"{', '.join(map(str, logs))}: there are no events")
    return num_events


def _sorted_parts(
    folder: Path, num_events: np.ndarray, max_history_seqlen: int | None, held_events: int
) -> Iterator[Path]:
    """Writes a file for each range of users with their kept events by user, then time, then log order.

    Row groups of a run that are outside the range are not read.
    """
    runs = sorted(folder.glob("run-*.parquet"))
    total = int(num_events.sum())
    with tqdm(total=total, desc="sort", unit="event", unit_scale=True, disable=None) as progress:
        for first, last in _user_ranges(num_events, held_events):
            user_rows = pl.scan_parquet(runs).filter(pl.col(USER_ID).is_between(first, last))
            part = user_rows.collect().sort(USER_ID, TIME, maintain_order=True)
            progress.update(len(part))
            if max_history_seqlen is not None:
                part = part.filter(pl.int_range(pl.len()).reverse().over(USER_ID) < max_history_seqlen)
            path = folder / f"part-{first:09}.parquet"
            part.write_parquet(path, compression="lz4")
            yield path


def _user_ranges(num_events: np.ndarray, held_events: int) -> Iterator[tuple[int, int]]:
    """Yields first and last user of ranges with at most `held_events` events, or a single user with more.

    Users without events may be in no range.
    """
    ends = np.cumsum(num_events)
    first, before = 0, 0
    while before < ends[-1]:
        last = int(np.searchsorted(ends, before + held_events, side="right")) - 1
        # A single user may exceed the limit; skipped users before it have no events.
        last = max(last, int(np.searchsorted(ends, before, side="right")))
        yield first, last
        first, before = last + 1, int(ends[last])


def _write_sequences(
    path: Path, parts: list[Path], video_ids: np.ndarray, contextual: pl.DataFrame, held_events: int
) -> None:
    """Writes one row per user; an item is 1 + its video's place in `video_ids`."""
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

    # Only a query writes a file piece by piece. A row group is a number of users.
    row_group = max(1, held_events // max(1, num_events // len(contextual)))
    register_io_source(rows, schema=_SEQUENCES_SCHEMA).sink_parquet(path, row_group_size=row_group)
