"""Splits interactions by user into files for training, validation, and testing.

    python -m commons.datasets.sid_preprocess --interactions FILE --out DIR [--seed 0] [--split 80 10 10]

Each line of the input is a JSON object with `user`, a string or an integer; `history`, a list of item ids,
oldest first, which may be empty; and `next`, the item after them. The output files `training.parquet`,
`validation.parquet`, and `testing.parquet` have one row per input line, in order. Their columns are
`user_id`, a string, and `sequence_data`, the history and the next item. All rows of a user are in one file:
the sorted users are shuffled with the seed and divided by the split's percentages. User 1 is also user "1".
"""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from .. import NAME
from ..argument_checks import require, require_at_least
from ..delimited import read_lines
from ..local_paths import local_path
from .prepared_files import check_replaceable, replaced_files
from .sid_sequences import SEQUENCE_COLUMN

PART_FILES = ("training.parquet", "validation.parquet", "testing.parquet")
USER_COLUMN = "user_id"
_EXAMPLE = '{"user": 7, "history": [31, 4, 15], "next": 9}'


def convert(interactions: Path, out_dir: Path, seed: int, split: Sequence[int]) -> dict[str, int]:
    """Writes the three files to `out_dir`, and returns the number of rows by file name.

    Args:
        interactions: file of JSON lines.
        out_dir: output folder, created if absent. Replaces an earlier run's files, never `interactions`.
        seed: seed of the split, at least 0.
        split: percentage of the users in each file. A file with 0 percent has no rows.

    Raises:
        OSError: `interactions` does not exist, or a file, link, or folder is in the way of an output.
        ValueError: a line is malformed, there are no lines, or `seed` or `split` is out of range.
    """
    require_at_least(0, "seed", seed)
    is_split = len(split) == len(PART_FILES) and min(split) >= 0 and sum(split) == 100
    require(is_split, "split", tuple(split), "three percentages from 0 that sum to 100")
    if not interactions.is_file():
        state = "is a folder" if interactions.exists() else "does not exist"
        raise FileNotFoundError(f"{interactions} {state}; expected a file of JSON lines")
    check_replaceable(out_dir, PART_FILES, [interactions])
    with tqdm(total=3, desc="read", unit="stage", disable=None) as progress:

        def next_stage(name: str) -> None:
            progress.update()
            progress.set_description(name)

        table = _read_interactions(interactions)
        next_stage("split")
        part_of_row = _parts(table[USER_COLUMN], seed, split)
        parts = {name: table.filter(part_of_row == part) for part, name in enumerate(PART_FILES)}
        next_stage("write")
        with replaced_files(out_dir, PART_FILES, [interactions]) as folder:
            for name, part in parts.items():
                part.write_parquet(folder / name)
        next_stage("done")
    return {name: len(part) for name, part in parts.items()}


def _read_interactions(path: Path) -> pl.DataFrame:
    users, sequences = [], []
    for text in read_lines(path):
        for row, line in enumerate(text.lines):
            try:
                user, sequence = _parse(line)
            except ValueError as error:
                raise text.malformed(row, str(error)) from error
            users.append(user)
            sequences.append(sequence)
    if not users:
        raise ValueError(f"{path} has no interactions")
    return pl.DataFrame(
        {USER_COLUMN: users, SEQUENCE_COLUMN: sequences},
        schema={USER_COLUMN: pl.String, SEQUENCE_COLUMN: pl.List(pl.Int64)},
    )


def _parse(line: str) -> tuple[str, list[int]]:
    """Returns the user and the item ids of one line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON ({getattr(error, 'msg', error)}), expected an object") from error
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, as in {_EXAMPLE}")
    for name in ("user", "history", "next"):
        if name not in fields:
            raise ValueError(f"there is no {name!r}, expected an object as in {_EXAMPLE}")
    user, history, following = fields["user"], fields["history"], fields["next"]
    if type(user) not in (str, int):
        raise ValueError(f"user = {reprlib.repr(user)}: expected a string or an integer")
    if not isinstance(history, list):
        raise ValueError(f"history = {reprlib.repr(history)}: expected a list of item ids")
    for item in (*history, following):
        if not _is_item_id(item):
            raise ValueError(f"item {reprlib.repr(item)}: expected an integer from 0 that int64 holds")
    return str(user), [*history, following]


def _is_item_id(item: Any) -> bool:
    return type(item) is int and 0 <= item < 2**63  # isinstance would accept True


def _parts(user_of_row: pl.Series, seed: int, split: Sequence[int]) -> pl.Series:
    """Returns the index of each row's output file."""
    users = sorted(set(user_of_row))
    order = np.random.default_rng(seed).permutation(len(users))
    ends = np.cumsum(split) * len(users) // 100
    parts = np.repeat(np.arange(len(split)), np.diff(ends, prepend=0))
    part_of = {users[user]: part for user, part in zip(order, parts, strict=True)}
    return pl.Series([part_of[user] for user in user_of_row])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. On an error, prints one line and exits with code 1."""
    from .. import quiet_logs  # noqa: F401  only here, where this is the program

    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}.datasets.sid_preprocess",
        description="Splits interactions by user into files for training, validation and testing.",
    )
    parser.add_argument(
        "--interactions", required=True, type=local_path, help="JSON lines with user, history and next"
    )
    parser.add_argument("--out", required=True, type=local_path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split (0)")
    parser.add_argument(
        "--split",
        type=int,
        nargs=len(PART_FILES),
        default=[80, 10, 10],
        metavar="PERCENT",
        help="percentages of users for training, validation and testing (80 10 10)",
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
