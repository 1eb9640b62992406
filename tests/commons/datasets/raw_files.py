"""Small raw files of each format, with the preprocessor that reads them and what it makes of them."""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pytest

from commons.datasets import kuairand_preprocess, movielens_preprocess, sid_preprocess
from tests.commons.datasets.kuairand_files import LOG_HEADER, LOGS_1K, USERS_HEADER, log_line, user_line
from tests.commons.datasets.text_variants import Change, unchanged

GOLDEN = 0x9E3779B97F4A7C15


def splitmix(value: int) -> int:
    """The finalizer of splitmix64, on Python's integers."""
    value %= 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31


def text_of(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("latin-1")


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def error_of(main: Callable[[list[str]], None], *arguments: object) -> str:
    """Returns the error of a preprocessor that stops, which is one line."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    error = str(stopped.value)
    assert error.startswith("error: ") and "\n" not in error
    return error


@dataclass(frozen=True)
class RawFiles:
    """Raw files of a dataset by name, of which tests change the first, and the rows that are read of them."""

    main: Callable[[Sequence[str]], None]
    dataset: str | None
    files: Mapping[str, bytes] = field(default_factory=dict)
    rows: Sequence[tuple] = field(default=(), repr=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.dataset is None:
            return ("training.parquet", "validation.parquet", "testing.parquet")
        return ("sequences.parquet", "meta.json")

    def write(self, folder: Path, change: Change = unchanged) -> Path:
        """Writes the files with the first one changed, and returns its path."""
        paths = []
        for name, content in self.files.items():
            paths.append(write_file(folder / name, content if paths else change(content)))
        return paths[0]

    def arguments(self, folder: Path) -> list[str]:
        """Returns the command's arguments without the output folder."""
        if self.dataset is None:
            return ["--interactions", str(folder / next(iter(self.files))), "--split", "100", "0", "0"]
        return ["--dataset", self.dataset, "--raw", str(folder)]

    def prepare(self, folder: Path, out: Path) -> tuple[pl.DataFrame, dict]:
        """Returns the first table that the command writes, and the metadata."""
        self.main([*self.arguments(folder), "--out", str(out)])
        meta = {} if self.dataset is None else json.loads((out / "meta.json").read_text())
        return pl.read_parquet(out / self.outputs[0]), meta

    def read(self, folder: Path, out: Path) -> list[tuple]:
        """Returns what the command reads, to compare with `rows`."""
        columns = ["user_id", "items", "actions", "timestamps"]
        if self.dataset is None:
            columns = ["user_id", "sequence_data"]
        return self.prepare(folder, out)[0].select(columns).rows()


RATINGS_HEADER = "userId,movieId,rating,timestamp"
RATINGS_CSV = text_of(RATINGS_HEADER, "1,2,3.5,1112486027", "1,29,0.5,1112484676", "4,2,5.0,7")
STARS = [(1, [29, 2], [1, 7], [1112484676, 1112486027]), (4, [2], [10], [7])]
RATINGS_100K = text_of("7\t11\t5\t100", "3\t12\t4\t50", "7\t12\t1\t90")
USERS_100K = text_of("3|24|M|writer|85711", "7|24|F|artist|T8H1N", "9|30|M|other|10003")
RATINGS_1M = RATINGS_100K.replace(b"\t", b"::")
USERS_1M = text_of("3::M::24::9::85711", "7::F::24::3::T8H1N", "9::M::30::0::10003")
ROWS_100K = [(3, [12], [4], [50]), (7, [12, 11], [1, 5], [90, 100])]
EVENTS = text_of(LOG_HEADER, log_line(9, 70, 50), log_line(0, 5, 40, 0b1))
USERS = text_of(USERS_HEADER, user_line(9), user_line(0))
LOG_FILES = {LOGS_1K[0]: EVENTS, LOGS_1K[1]: text_of(LOG_HEADER), "user_features_1k.csv": USERS}
EVENT_ROWS = [(1, [1], [2], [40]), (2, [2], [1], [50])]
MOVIELENS, KUAIRAND = movielens_preprocess.main, kuairand_preprocess.main
INTERACTIONS = text_of('{"user": 0, "history": [8, 1], "next": 3}')

FORMATS = {
    "ml-20m": RawFiles(MOVIELENS, "ml-20m", {"ratings.csv": RATINGS_CSV}, STARS),
    "u.data": RawFiles(MOVIELENS, "ml-100k", {"u.data": RATINGS_100K, "u.user": USERS_100K}, ROWS_100K),
    "ratings.dat": RawFiles(
        MOVIELENS, "ml-1m", {"ratings.dat": RATINGS_1M, "users.dat": USERS_1M}, ROWS_100K
    ),
    "users.dat": RawFiles(MOVIELENS, "ml-1m", {"users.dat": USERS_1M, "ratings.dat": RATINGS_1M}, ROWS_100K),
    "u.user": RawFiles(MOVIELENS, "ml-100k", {"u.user": USERS_100K, "u.data": RATINGS_100K}, ROWS_100K),
    "log": RawFiles(KUAIRAND, "kuairand-1k", LOG_FILES, EVENT_ROWS),
    "users": RawFiles(KUAIRAND, "kuairand-1k", dict(reversed(LOG_FILES.items())), EVENT_ROWS),
    "interactions": RawFiles(sid_preprocess.main, None, {"lines.jsonl": INTERACTIONS}, [("0", [8, 1, 3])]),
}


def write_archive(
    path: Path,
    folder: str = "ml-100k",
    files: Mapping[str, bytes] = FORMATS["u.data"].files,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(f"{folder}/{name}", content)
    return path
