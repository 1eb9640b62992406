"""Divides interactions into files for training, validation and testing, by user.

    python -m commons.datasets.sid_preprocess --interactions FILE --out DIR [--seed 0] [--split 80 10 10]

The input has one JSON object per line: `user`, a string or an integer; `history`, item ids, oldest first, may
be empty; and `next`, the item after them. The output is `training.parquet`, `validation.parquet` and
`testing.parquet`, one row per line of the input, in its order, with the columns `user_id`, a string, and
`sequence_data`, the history and the next item. All rows of a user are in the same file: the users, sorted,
are shuffled with the seed, and divided by the percentages of the split. User 1 is user "1".
"""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from commons.datasets.sid_sequences import SEQUENCE_COLUMN

PART_FILES = ("training.parquet", "validation.parquet", "testing.parquet")
USER_COLUMN = "user_id"


def convert(interactions: Path, out_dir: Path, seed: int, split: Sequence[int]) -> dict[str, int]:
    """Writes the files to `out_dir`.

    Args:
        interactions: the file of JSON lines.
        out_dir: made if need be; files of an earlier run are replaced.
        seed: of the division, at least 0.
        split: percentages of the users in each file; a file of 0 percent has no rows.

    Returns:
        Rows of each file, by its name.

    Raises:
        FileNotFoundError: `interactions` does not exist.
        ValueError: a line is malformed, there is none, or `seed` or `split` is out of range.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: expected at least 0")
    if len(split) != len(PART_FILES) or min(split) < 0 or sum(split) != 100:
        raise ValueError(f"split = {tuple(split)}: expected three percentages from 0 that sum to 100")
    if not interactions.is_file():
        raise FileNotFoundError(f"{interactions} does not exist; expected a file of JSON lines")
    with tqdm(total=3, desc="read", unit="stage") as progress:

        def next_stage(name: str) -> None:
            progress.update()
            progress.set_description(name)

        table = _read_interactions(interactions)
        next_stage("split")
        part_of_row = _parts(table[USER_COLUMN], seed, split)
        parts = {name: table.filter(part_of_row == part) for part, name in enumerate(PART_FILES)}
        next_stage("write")
        _write(parts, out_dir)
        next_stage("done")
    return {name: len(part) for name, part in parts.items()}


def _read_interactions(path: Path) -> pl.DataFrame:
    users, sequences = [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                user, sequence = _parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            users.append(user)
            sequences.append(sequence)
    if not users:
        raise ValueError(f"{path} has no interactions")
    return pl.DataFrame(
        {USER_COLUMN: users, SEQUENCE_COLUMN: sequences},
        schema={USER_COLUMN: pl.String, SEQUENCE_COLUMN: pl.List(pl.Int64)},
    )


def _parse(line: bytes) -> tuple[str, list[int]]:
    """User and item ids of one line."""
    try:
        fields = json.loads(line.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{reprlib.repr(fields)}: expected a JSON object")
    for name in ("user", "history", "next"):
        if name not in fields:
            raise ValueError(f"there is no {name!r}; it has {list(fields)}")
    user, history = fields["user"], fields["history"]
    if type(user) not in (str, int):
        raise ValueError(f"user = {reprlib.repr(user)}: expected a string or an integer")
    if not isinstance(history, list):
        raise ValueError(f"history = {reprlib.repr(history)}: expected a list of item ids")
    for name, item in [*(("history", item) for item in history), ("next", fields["next"])]:
        if not _is_item_id(item):
            raise ValueError(
                f"{name} has item {reprlib.repr(item)}: expected an integer from 0 that int64 holds"
            )
    return str(user), [*history, fields["next"]]


def _is_item_id(item: Any) -> bool:
    return type(item) is int and 0 <= item < 2**63  # type, as True is an instance of int


def _parts(user_of_row: pl.Series, seed: int, split: Sequence[int]) -> pl.Series:
    """The number of each row's part."""
    users = sorted(set(user_of_row))
    order = np.random.default_rng(seed).permutation(len(users))
    ends = np.cumsum(split) * len(users) // 100
    parts = np.repeat(np.arange(len(split)), np.diff(ends, prepend=0))
    part_of = {users[user]: part for user, part in zip(order, parts, strict=True)}
    return pl.Series([part_of[user] for user in user_of_row])


def _write(parts: dict[str, pl.DataFrame], out_dir: Path) -> None:
    """Files of two runs never lie side by side, even if this is interrupted: rather, one is missing."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".unfinished-") as unfinished:
        for name, part in parts.items():
            part.write_parquet(Path(unfinished) / name)
        for name in parts:
            (out_dir / name).unlink(missing_ok=True)
        for name in parts:
            (Path(unfinished) / name).rename(out_dir / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; an error becomes one line and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="python -m commons.datasets.sid_preprocess",
        description="Divides interactions into files for training, validation and testing, by user.",
    )
    parser.add_argument(
        "--interactions", required=True, type=Path, help="JSON lines with user, history and next"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the division (0)")
    parser.add_argument(
        "--split",
        type=int,
        nargs=len(PART_FILES),
        default=[80, 10, 10],
        metavar="PERCENT",
        help="users for training, validation and testing (80 10 10)",
    )
    options = parser.parse_args(arguments)
    try:
        rows = convert(options.interactions, options.out, options.seed, options.split)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, num_rows in rows.items():
        print(f"{options.out / name}: {num_rows} rows")


if __name__ == "__main__":
    main()
