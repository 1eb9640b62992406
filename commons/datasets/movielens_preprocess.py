"""Prepares MovieLens for training: one row per user, with the user's ratings in order of time.

    python -m commons.datasets.movielens_preprocess --dataset ml-100k [--raw DIR] [--out DIR]

Raw files that are absent are downloaded from GroupLens. The output is `sequences.parquet`, sorted by user id,
with the contextual columns and the list columns items, actions and timestamps, and `meta.json`. An action id
is 1 + the rating's class: 1 to 5 for whole stars, 1 to 10 for half stars. Ratings of equal time keep the
order of the raw file. Age, gender, occupation and zip code become ids from 1 in the order of their values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from tqdm import tqdm

from commons.datasets.movielens_download import fetch_raw_files
from commons.datasets.movielens_format import (
    FORMATS,
    ITEM,
    RATING,
    TIMESTAMP,
    USER_ID,
    MovieLensFormat,
    read_ratings,
    read_users,
)
from commons.datasets.user_sequences import META_FILE, SEQUENCES_FILE, SequencesMeta


def preprocess(movielens: MovieLensFormat, raw_dir: Path, out_dir: Path) -> SequencesMeta:
    """Writes a dataset's `sequences.parquet` and `meta.json` to `out_dir`.

    Raises:
        ConnectionError: raw files are absent and cannot be downloaded.
        ValueError: a raw file is malformed.
    """
    with tqdm(total=4, desc="fetch raw files", unit="stage") as progress:

        def next_stage(name: str) -> None:
            progress.update()
            progress.set_description(name)

        fetch_raw_files(raw_dir, movielens)
        next_stage("read")
        ratings = read_ratings(raw_dir, movielens)
        users = None if movielens.users_file is None else read_users(raw_dir, movielens)
        next_stage("sort")
        sequences = _sequences(ratings)
        if users is not None:
            sequences = _with_user_columns(sequences, users, raw_dir, movielens)
        meta = _meta(sequences, movielens)
        next_stage("write")
        out_dir.mkdir(parents=True, exist_ok=True)
        # The meta file last: without it, what an interrupted run has left does not open.
        (out_dir / META_FILE).unlink(missing_ok=True)
        sequences.write_parquet(out_dir / SEQUENCES_FILE)
        meta.write(out_dir / META_FILE)
        next_stage("done")
    return meta


def _sequences(ratings: pl.DataFrame) -> pl.DataFrame:
    """One row per user, by user id, with the user's ratings by time."""
    return (
        ratings.sort(USER_ID, TIMESTAMP, maintain_order=True)
        .group_by(USER_ID, maintain_order=True)
        .agg(
            pl.col(ITEM).alias("items"),
            pl.col(RATING).alias("actions"),
            pl.col(TIMESTAMP).alias("timestamps"),
        )
    )


def _with_user_columns(
    sequences: pl.DataFrame, users: pl.DataFrame, raw_dir: Path, movielens: MovieLensFormat
) -> pl.DataFrame:
    unknown = sequences.join(users, on=USER_ID, how="anti")
    if len(unknown):
        raise ValueError(
            f"{raw_dir / movielens.ratings_file} has user {unknown[USER_ID][0]}, "
            f"{raw_dir / str(movielens.users_file)} does not"
        )
    attributes = [name for name in users.columns if name != USER_ID]
    encoded = users.with_columns(pl.col(attributes).rank("dense").cast(pl.Int32))
    return sequences.join(encoded, on=USER_ID, how="left", maintain_order="left")


def _meta(sequences: pl.DataFrame, movielens: MovieLensFormat) -> SequencesMeta:
    contextual = [USER_ID, *(name for name in sorted(movielens.user_columns) if name != USER_ID)]
    largest = sequences.select(pl.col(contextual).max()).row(0, named=True)
    largest[ITEM] = sequences["items"].list.max().max()
    largest[RATING] = movielens.num_classes
    return SequencesMeta(
        dataset=movielens.dataset,
        contextual_feature_names=contextual,
        item_feature_name=ITEM,
        action_feature_name=RATING,
        vocab_sizes={name: largest_id + 1 for name, largest_id in largest.items()},
        num_classes=movielens.num_classes,
        positive_class=movielens.positive_class,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; an error becomes one line and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="python -m commons.datasets.movielens_preprocess",
        description="Prepares a MovieLens dataset for training; downloads it if need be.",
    )
    parser.add_argument("--dataset", required=True, choices=list(FORMATS))
    parser.add_argument("--raw", type=Path, help="folder of the official files (data/DATASET/raw)")
    parser.add_argument("--out", type=Path, help="folder to write to (data/DATASET)")
    options = parser.parse_args(arguments)
    default = Path("data") / options.dataset
    out_dir = options.out or default
    try:
        preprocess(FORMATS[options.dataset], options.raw or default / "raw", out_dir)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{options.dataset} is in {out_dir}")


if __name__ == "__main__":
    main()
