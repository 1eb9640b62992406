import json
from pathlib import Path

import polars as pl
import pytest

# User 7 has ten ratings, 3 has four of which two are at the same time, 5 has one.
RATINGS_100K = [
    (7, 11, 5, 100),
    (3, 12, 4, 50),
    (7, 12, 1, 90),
    (3, 11, 3, 50),
    (5, 30, 2, 70),
    (3, 13, 2, 10),
    (3, 14, 1, 60),
    *((7, 20 + i, 1 + i % 5, 200 + i) for i in range(8)),
]
USERS_100K = ["3|24|M|writer|85711", "5|53|F|other|94043", "7|24|F|artist|T8H1N", "9|30|M|other|10003"]


GOLDEN = 0x9E3779B97F4A7C15


def splitmix(value: int) -> int:
    """The finalizer of splitmix64, on Python's integers."""
    value %= 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="latin-1")
    return path


@pytest.fixture
def raw_100k(tmp_path):
    write_lines(tmp_path / "raw/u.data", ["\t".join(map(str, rating)) for rating in RATINGS_100K])
    return write_lines(tmp_path / "raw/u.user", USERS_100K).parent


def prepare(main, dataset, raw, out, *options):
    """Runs a preprocessor, and returns the table and the metadata that it writes."""
    main(["--dataset", dataset, "--raw", str(raw), "--out", str(out), *options])
    return pl.read_parquet(out / "sequences.parquet"), json.loads((out / "meta.json").read_text())


def error_of(main, *arguments):
    """Returns the error of a preprocessor that stops."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(stopped.value)
    return str(stopped.value)
