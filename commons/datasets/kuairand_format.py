"""The official file formats of KuaiRand, and reading them.

Gao et al., "KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos",
CIKM 2022.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NoReturn

import polars as pl

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
_FLAGS = (*TASKS, "is_rand")
_IDS = (USER_ID, VIDEO_ID)
# The last column tells whether a line is complete, as polars fills up short ones with nulls.
_COMPLETE = (*_IDS, TIME, *_FLAGS, "tab")
# Of columns that nothing is taken from it is enough that they are numbers, or empty.
_LOG_TYPES = {name: pl.Int64 if name in _COMPLETE else pl.Float64 for name in LOG_HEADER.split(",")}
_BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class KuaiRandFormat:
    """The files of one KuaiRand dataset.

    Attributes:
        dataset: the dataset's name.
        log_files: the standard logs, in order of time. The log of randomly exposed videos is not among
            them: it is for unbiased evaluation, and not what the users' feed has shown them.
        users_file: a line per user.
    """

    dataset: str
    log_files: tuple[str, ...]
    users_file: str


def _format(version: str, parts: tuple[str, ...]) -> KuaiRandFormat:
    periods = ("4_08_to_4_21", "4_22_to_5_08")
    logs = (f"log_standard_{period}_{version}{part}.csv" for period in periods for part in parts)
    return KuaiRandFormat(f"kuairand-{version}", tuple(logs), f"user_features_{version}.csv")


FORMATS = {
    kuairand.dataset: kuairand
    for kuairand in (
        _format("pure", ("",)),
        _format("1k", ("",)),
        _format("27k", ("_part1", "_part2")),
    )
}


def find_raw_files(raw_dir: Path, kuairand: KuaiRandFormat) -> tuple[list[Path], Path]:
    """The logs, in order of time, and the users' file: in `raw_dir`, or in its folder `data`.

    Raises:
        FileNotFoundError: files are absent; says where they are expected and come from.
    """
    folder = raw_dir / "data" if (raw_dir / "data").is_dir() else raw_dir
    expected = (*kuairand.log_files, kuairand.users_file)
    absent = [name for name in expected if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{folder} does not have {', '.join(absent)}; put the official archive's files there, which "
            f"{PAGE_URL} has"
        )
    return [folder / name for name in kuairand.log_files], folder / kuairand.users_file


def read_users(path: Path) -> pl.DataFrame:
    """The users in file order: an Int64 column user_id, and the attributes, strings that may be empty.

    Raises:
        ValueError: a line is malformed, or a user has two; names the file and the line.
    """
    header, *lines = path.read_text(encoding="latin-1").split("\n")
    columns = _fields(header)
    wanted = (USER_ID, *USER_ATTRIBUTES)
    if not set(wanted) <= set(columns):
        raise ValueError(f"{path}, line 1: expected a header with the columns {', '.join(wanted)}")
    if lines and not lines[-1]:
        lines.pop()  # what follows the last line's end
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
    """Of a line of the users' file, where a range like "(10,50]" is quoted; none if it is malformed."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _is_id(field: str) -> bool:
    return field.isascii() and field.isdecimal() and int(field) < 2**63


@dataclass(frozen=True)
class LogBlock:
    """Events of successive lines of a log.

    Attributes:
        events: in file order; Int64 columns user_id, video_id and time_ms, and action, Int16, bits of
            `TASKS`.
        first_line: the number of the first event's line in the file.
        num_bytes: of the file.
    """

    events: pl.DataFrame
    first_line: int
    num_bytes: int


def read_log(path: Path) -> Iterator[LogBlock]:
    """A log's events, some hundred thousand at a time: memory does not depend on the file's size.

    Raises:
        ValueError: a line is malformed; names the file and the line.
    """
    with path.open("rb") as file:
        if file.readline().rstrip(b"\r\n") != LOG_HEADER.encode():
            raise ValueError(f"{path}, line 1: expected the header {LOG_HEADER!r}")
        first_line = 2
        while text := file.read(_BLOCK_BYTES):
            text += file.readline()
            events = _parse(text)
            if events is None:
                _name_malformed(path, first_line, text)
            yield LogBlock(events, first_line, len(text))
            first_line += len(events)


def _parse(text: bytes) -> pl.DataFrame | None:
    """The events of lines, or None if any of them is malformed."""
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


def _name_malformed(path: Path, first_line: int, text: bytes) -> NoReturn:
    """Halves the lines, of which one is malformed, until one is left: `_parse` alone says what is."""
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
