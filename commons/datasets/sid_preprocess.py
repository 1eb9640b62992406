"""Splits interactions by user into files for training, validation, and testing.

    python -m commons.datasets.sid_preprocess --interactions FILE --out DIR [--seed 0] [--split 80 10 10]

Each line of the input is a JSON object with `user`, a string or an integer; `history`, a list of item ids,
oldest first, which may be empty; and `next`, the item after them. The output files `training.parquet`,
`validation.parquet`, and `testing.parquet` have one row per input line, in order. Their columns are
`user_id`, a string, and `sequence_data`, the history and the next item. All rows of a user are in one file:
the sorted users are shuffled with the seed and divided by the split's percentages. User 1 is also user "1".
The input may be gzipped.
"""

from __future__ import annotations

import argparse
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from tqdm import tqdm

from .. import NAME
from ..argument_checks import require, require_at_least
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
    schema = {"user": pl.String(), "history": pl.List(pl.Int64()), "next": pl.Int64()}
    try:
        lines = pl.read_ndjson(path, schema=schema)
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = " ".join(str(error).split())  # polars' errors have several lines
        raise ValueError(f"{path} cannot be read: {reason}; expected lines as {_EXAMPLE}") from error
    if not len(lines):
        raise ValueError(f"{path} has no interactions")
    items = pl.concat_list("history", "next")
    are_ids = items.list.eval(pl.element().is_not_null() & (pl.element() >= 0)).list.all().fill_null(False)
    is_whole = pl.col("user").is_not_null() & are_ids
    for row in lines.select((~is_whole).arg_true()).to_series()[:1]:
        found = reprlib.repr(lines.row(row, named=True))
        raise ValueError(f"{path}, row {row + 1}: {found}; expected item ids from 0, as in {_EXAMPLE}")
    return lines.select(pl.col("user").alias(USER_COLUMN), items.alias(SEQUENCE_COLUMN))


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
