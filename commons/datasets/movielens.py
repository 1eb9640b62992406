"""MovieLens: download of the official files, and their conversion to users' sequences."""

from __future__ import annotations

import errno
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import polars as pl
import torch
from tqdm import tqdm

from .. import NAME
from ..delimited import Column, integer, read_table
from .prepared_dataset import (
    META_FILE,
    SEQUENCES_FILE,
    TIE_ORDER,
    PreparedDataset,
    check_one_line_per_user,
    register_formats,
    tie_keys,
)
from .prepared_files import check_folder, check_replaceable, is_absent, raw_file, replaced_files
from .user_sequences import SequencesMeta

ARCHIVES_URL = "https://files.grouplens.org/datasets/movielens"
USER_ID, ITEM, RATING, TIMESTAMP = "user_id", "movie_id", "rating", "timestamp"
_HEADER = ("userId", "movieId", "rating", "timestamp")  # header of the ratings in newer datasets
_LARGEST_ID = 2**31 - 1


class MovieLens(PreparedDataset):
    """One MovieLens dataset and the format of its official files. The defaults describe newer datasets.

    Attributes:
        folder: name of the archive's folder. None means the name of the dataset.
        ratings_file: file with the columns user, item, rating, and Unix time.
        also_named: other names of the ratings file.
        ratings_separator: separator of the ratings' columns. None means that a header names the columns.
        classes_per_star: number of classes per star. Ratings are multiples of 1 ÷ this, up to 5 stars.
        users_file: file with `user_columns`. None means that the dataset does not describe users.
        users_separator: separator of `user_columns`.
        user_columns: columns of `users_file`, including the user id.
    """

    preprocessor = f"{NAME}.datasets.movielens_preprocess"
    folder: ClassVar[str | None] = None
    ratings_file: ClassVar[str] = "ratings.csv"
    also_named: ClassVar[tuple[str, ...]] = ()
    ratings_separator: ClassVar[str | None] = None
    classes_per_star: ClassVar[int] = 2
    users_file: ClassVar[str | None] = None
    users_separator: ClassVar[str] = ""
    user_columns: ClassVar[tuple[str, ...]] = ()

    def prepare(self, raw_dir: Path, out_dir: Path) -> SequencesMeta:
        """Converts the files in `raw_dir`, downloaded if absent, to `sequences.parquet` and `meta.json`.

        A raw file may be in the archive's folder, and it may be compressed by gzip, with the suffix ".gz". If
        a folder has both versions, the uncompressed file is used.

        Raises:
            OSError: a download failed, or a file, link, or folder is in the way of an output.
            ValueError: a raw file or the archive is malformed.
        """
        check_folder(raw_dir, "--raw")
        outputs = (SEQUENCES_FILE, META_FILE)
        names = [(self.ratings_file, *self.also_named)]
        if self.users_file is not None:
            names.append((self.users_file,))
        folders = (raw_dir, raw_dir / (self.folder or self.name))
        raw_files = [raw_file(folders, *of_one) or raw_dir / of_one[0] for of_one in names]
        check_replaceable(out_dir, outputs, raw_files)
        with tqdm(total=4, desc="fetch raw files", unit="stage", disable=None) as progress:

            def next_stage(name: str) -> None:
                progress.update()
                progress.set_description(name)

            self._fetch(raw_dir, raw_files)
            next_stage("read")
            ratings = self._read_ratings(raw_files[0])
            users = None if self.users_file is None else self._read_users(raw_files[1])
            next_stage("sort")
            sequences = _sequences(ratings)
            if users is not None:
                sequences = self._with_user_columns(sequences, users, raw_files)
            meta = self._meta(sequences)
            next_stage("write")
            with replaced_files(out_dir, outputs, raw_files) as folder:
                sequences.write_parquet(folder / SEQUENCES_FILE)
                meta.write(folder / META_FILE)
            next_stage("done")
        return meta

    def _fetch(self, raw_dir: Path, raw_files: list[Path]) -> None:
        """Unpacks absent raw files from the archive in `raw_dir`, downloaded from GroupLens if absent."""
        absent = [path for path in raw_files if is_absent(path)]
        if not absent:
            return
        raw_dir.mkdir(parents=True, exist_ok=True)
        archive = raw_dir / f"{self.name}.zip"
        if is_absent(archive):
            _download(f"{ARCHIVES_URL}/{archive.name}", archive, [path.name for path in absent])
        try:
            # A damaged member must not pass for a complete file.
            with zipfile.ZipFile(archive) as members, TemporaryDirectory(dir=raw_dir) as folder:
                for path in absent:
                    member = members.extract(f"{self.folder or self.name}/{path.name}", folder)
                    Path(member).rename(path)
        except Exception as error:  # a damaged archive raises nearly any type of error
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # such as a full disk
            raise ValueError(
                f"{archive} is not the official {self.name} archive ({error}); delete it to download it again"
            ) from error

    def _read_ratings(self, path: Path) -> pl.DataFrame:
        """Reads ratings in file order: user, item, and rating (class + 1) as Int32, and time as Int64."""
        user, item, rating, timestamp = names = (USER_ID, ITEM, RATING, TIMESTAMP)
        if self.ratings_separator is None:
            user, item, rating, timestamp = _HEADER
        step = 1 / self.classes_per_star
        stars = pl.col(rating).cast(pl.Float64, strict=False) * self.classes_per_star
        is_class = (stars == stars.round()) & stars.is_between(1, 5 * self.classes_per_star)
        seconds = pl.coalesce(
            pl.col(timestamp).cast(pl.Int64, strict=False),
            # Kaggle's copy of ml-20m has dates in UTC.
            pl.col(timestamp).str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s"),
        )
        columns = (
            integer(user, 1, _LARGEST_ID),
            integer(item, 1, _LARGEST_ID),
            Column(rating, pl.when(is_class).then(stars), f"{step:g} to 5 in steps of {step:g}"),
            Column(timestamp, seconds, "Unix time in seconds, or a date as in 2005-04-02 23:53:47"),
        )
        without_header = None if self.ratings_separator is None else names
        ratings = read_table(path, columns, self.ratings_separator or ",", without_header)
        ratings.columns = names
        return ratings.with_columns(pl.col(USER_ID, ITEM, RATING).cast(pl.Int32))

    def _read_users(self, path: Path) -> pl.DataFrame:
        """Reads users in file order: user id and age as Int32, and the other columns as strings."""
        columns = [
            {USER_ID: integer(USER_ID, 1, _LARGEST_ID), "age": integer("age", 0, _LARGEST_ID)}.get(name)
            or Column(name, pl.col(name).replace("", None), "no empty field")
            for name in self.user_columns
        ]
        users = read_table(path, columns, self.users_separator, self.user_columns)
        check_one_line_per_user(path, users[USER_ID], first_line=1)
        return users.with_columns(pl.col(USER_ID, "age").cast(pl.Int32))

    def _with_user_columns(
        self, sequences: pl.DataFrame, users: pl.DataFrame, raw_files: list[Path]
    ) -> pl.DataFrame:
        """Adds the users' attributes as ids, which start at 1 and follow the order of the values."""
        unknown = sequences.join(users, on=USER_ID, how="anti")
        if len(unknown):
            ratings_file, users_file = raw_files
            raise ValueError(f"{ratings_file} has user {unknown[USER_ID][0]}, {users_file} does not")
        attributes = [name for name in users.columns if name != USER_ID]
        encoded = users.with_columns(pl.col(attributes).rank("dense").cast(pl.Int32))
        return sequences.join(encoded, on=USER_ID, how="left", maintain_order="left")

    def _meta(self, sequences: pl.DataFrame) -> SequencesMeta:
        contextual = [USER_ID, *(name for name in sorted(self.user_columns) if name != USER_ID)]
        num_classes = 5 * self.classes_per_star
        largest = sequences.select(pl.col(contextual).max()).row(0, named=True)
        largest |= {ITEM: sequences["items"].list.max().max(), RATING: num_classes}
        return SequencesMeta(
            dataset=self.name,
            contextual_feature_names=contextual,
            item_feature_name=ITEM,
            action_feature_name=RATING,
            vocab_sizes={name: largest_id + 1 for name, largest_id in largest.items()},
            num_classes=num_classes,
            positive_class=4 * self.classes_per_star - 1,  # four stars
            tie_order=TIE_ORDER,
        )


MOVIELENS = register_formats(
    MovieLens,
    {
        "ml-100k": {
            "ratings_file": "u.data",
            "ratings_separator": "\t",
            "classes_per_star": 1,
            "users_file": "u.user",
            "users_separator": "|",
            "user_columns": (USER_ID, "age", "gender", "occupation", "zip_code"),
        },
        "ml-1m": {
            "ratings_file": "ratings.dat",
            "ratings_separator": "::",
            "classes_per_star": 1,
            "users_file": "users.dat",
            "users_separator": "::",
            "user_columns": (USER_ID, "gender", "age", "occupation", "zip_code"),
        },
        "ml-10m": {"folder": "ml-10M100K", "ratings_file": "ratings.dat", "ratings_separator": "::"},
        "ml-20m": {"also_named": ("rating.csv",)},  # Kaggle's copy
        **{name: {} for name in ("ml-25m", "ml-32m", "ml-latest", "ml-latest-small")},
    },
)


def _download(url: str, archive: Path, absent: Sequence[str]) -> None:
    """Downloads an archive. Errors name the `absent` raw files that it would provide."""
    try:
        # It writes a file of another name first, so an interrupted download does not pass for an archive.
        torch.hub.download_url_to_file(url, str(archive), progress=sys.stderr.isatty())
    except OSError as error:
        raise ConnectionError(
            f"{archive.parent} has no {' and no '.join(absent)}; could not download {url} ({error}): put the "
            f"raw files there; or fetch the archive by hand, put it at {archive} and run this again"
        ) from error


def _sequences(ratings: pl.DataFrame) -> pl.DataFrame:
    """Returns one row per user, sorted by user id, with the user's ratings in order of time."""
    users, items = (ratings[name].to_numpy() for name in (USER_ID, ITEM))
    return (
        ratings.with_columns(pl.Series("tie", tie_keys(users, items)))
        .sort(USER_ID, TIMESTAMP, "tie", ITEM, RATING)
        .group_by(USER_ID, maintain_order=True)
        .agg(
            pl.col(ITEM).alias("items"),
            pl.col(RATING).alias("actions"),
            pl.col(TIMESTAMP).alias("timestamps"),
        )
    )
