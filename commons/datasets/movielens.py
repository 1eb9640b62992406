"""MovieLens: the official files, fetching them, and converting them to users' sequences."""

from __future__ import annotations

import errno
import shutil
import urllib.request
import zipfile
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import polars as pl
from tqdm import tqdm

from .. import NAME
from .prepared_files import check_replaceable, is_absent, new_file, replaced_files
from .user_sequences import (
    META_FILE,
    SEQUENCES_FILE,
    DatasetFactory,
    PreparedDataset,
    SequencesMeta,
)

ARCHIVES_URL = "https://files.grouplens.org/datasets/movielens"
USER_ID, ITEM, RATING, TIMESTAMP = "user_id", "movie_id", "rating", "timestamp"
_TIMEOUT_S = 60
_CHUNK_BYTES = 1 << 20


class MovieLens(PreparedDataset):
    """One MovieLens dataset and the format of its official files.

    Attributes:
        name: the dataset's name, also that of its archive.
        ratings_file: file with the columns user, item, rating and Unix time.
        ratings_separator: separator of those columns.
        ratings_header: first line of `ratings_file`, or None if the file starts with data.
        classes_per_star: ratings are multiples of 1 ÷ this, up to 5 stars.
        users_file: file with `user_columns`, or None if the dataset does not describe users.
        users_separator: separator of those columns.
        user_columns: columns of `users_file`, the user id among them.
    """

    preprocessor = f"{NAME}.datasets.movielens_preprocess"
    ratings_file: ClassVar[str]
    ratings_separator: ClassVar[str]
    ratings_header: ClassVar[str | None] = None
    classes_per_star: ClassVar[int] = 1
    users_file: ClassVar[str | None] = None
    users_separator: ClassVar[str] = ""
    user_columns: ClassVar[tuple[str, ...]] = ()

    def prepare(self, raw_dir: Path, out_dir: Path) -> SequencesMeta:
        """Converts the files in `raw_dir`, downloaded if absent, to `sequences.parquet` and `meta.json`.

        Raises:
            ConnectionError: raw files are absent and the download failed.
            FileNotFoundError: a raw file is a link that leads nowhere.
            FileExistsError: a raw file, a link or a folder has the name of a file to write.
            ValueError: a raw file is malformed.
        """
        outputs = (SEQUENCES_FILE, META_FILE)
        raw_files = [raw_dir / name for name in (self.ratings_file, self.users_file) if name is not None]
        check_replaceable(out_dir, outputs, raw_files)
        with tqdm(total=4, desc="fetch raw files", unit="stage", disable=None) as progress:

            def next_stage(name: str) -> None:
                progress.update()
                progress.set_description(name)

            self._fetch(raw_dir, raw_files)
            next_stage("read")
            ratings = self._read_ratings(raw_dir / self.ratings_file)
            users = None if self.users_file is None else self._read_users(raw_dir / self.users_file)
            next_stage("sort")
            sequences = _sequences(ratings)
            if users is not None:
                sequences = self._with_user_columns(sequences, users, raw_dir)
            meta = self._meta(sequences)
            next_stage("write")
            with replaced_files(out_dir, outputs, raw_files) as folder:
                sequences.write_parquet(folder / SEQUENCES_FILE)
                meta.write(folder / META_FILE)
            next_stage("done")
        return meta

    def _fetch(self, raw_dir: Path, raw_files: list[Path]) -> None:
        """Makes sure that `raw_dir` has the raw files, those it lacks from the archive there or of GroupLens.

        Raises:
            ConnectionError: the download failed. The message says which file to put where by hand.
            ValueError: the archive is damaged or lacks a file.
        """
        absent = [path for path in raw_files if is_absent(path)]
        if not absent:
            return
        raw_dir.mkdir(parents=True, exist_ok=True)
        archive = raw_dir / f"{self.name}.zip"
        if is_absent(archive):
            _download(f"{ARCHIVES_URL}/{archive.name}", archive)
        try:
            with zipfile.ZipFile(archive) as members:
                for path in absent:
                    # A damaged member must not pass for a file.
                    with members.open(f"{self.name}/{path.name}") as member, new_file(path) as file:
                        shutil.copyfileobj(member, file)
        except Exception as error:  # a damaged archive raises nearly anything
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # a full disk, say
            raise ValueError(
                f"{archive} is not the official {self.name} archive ({error}); delete it to download it again"
            ) from error

    def _read_ratings(self, path: Path) -> pl.DataFrame:
        """Reads ratings in file order: Int32 columns user, item and rating (class + 1), Int64 time.

        Raises:
            ValueError: a line is malformed, or there are no ratings. Names the file and the line.
        """
        columns = (USER_ID, ITEM, RATING, TIMESTAMP)
        lines, fields = _read_fields(path, self.ratings_separator, columns, self.ratings_header)
        rating = pl.col(RATING).cast(pl.Float64, strict=False) * self.classes_per_star
        ratings = fields.select(
            pl.col(USER_ID).cast(pl.Int32, strict=False),
            pl.col(ITEM).cast(pl.Int32, strict=False),
            pl.when(rating == rating.round()).then(rating).cast(pl.Int32, strict=False).alias(RATING),
            pl.col(TIMESTAMP).cast(pl.Int64, strict=False),
        )
        is_valid = (
            (pl.col(USER_ID) >= 1)
            & (pl.col(ITEM) >= 1)
            & pl.col(RATING).is_between(1, 5 * self.classes_per_star)
            & pl.col(TIMESTAMP).is_not_null()
        )
        expected = self.ratings_separator.join(("user", "item", "rating", "timestamp"))
        first_line = 1 if self.ratings_header is None else 2
        _check_lines(path, first_line, lines, ratings.select(is_valid).to_series(), expected)
        if ratings.is_empty():
            raise ValueError(f"{path} has no ratings")
        return ratings

    def _read_users(self, path: Path) -> pl.DataFrame:
        """Reads users in file order: Int32 columns user id and age, the others strings.

        Raises:
            ValueError: a line is malformed, or a user has two lines. Names the file and the line.
        """
        lines, fields = _read_fields(path, self.users_separator, self.user_columns, header=None)
        users = fields.with_columns(pl.col(USER_ID, "age").cast(pl.Int32, strict=False))
        is_valid = (
            (pl.col(USER_ID) >= 1)
            & pl.col(USER_ID).is_first_distinct()
            & (pl.col("age") >= 0)
            & pl.all_horizontal(pl.col(pl.String).str.len_bytes() > 0)
            # The last column takes any surplus columns.
            & ~pl.col(self.user_columns[-1]).str.contains(self.users_separator, literal=True)
        )
        expected = f"{self.users_separator.join(self.user_columns)}, one line per user"
        _check_lines(path, 1, lines, users.select(is_valid).to_series(), expected)
        return users

    def _with_user_columns(self, sequences: pl.DataFrame, users: pl.DataFrame, raw_dir: Path) -> pl.DataFrame:
        """Adds the users' attributes, as ids from 1 in the order of their values."""
        unknown = sequences.join(users, on=USER_ID, how="anti")
        if len(unknown):
            raise ValueError(
                f"{raw_dir / self.ratings_file} has user {unknown[USER_ID][0]}, "
                f"{raw_dir / str(self.users_file)} does not"
            )
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
        )


class MovieLens100K(MovieLens):
    """100,000 ratings, with the users' age, gender, occupation and zip code."""

    name = "ml-100k"
    ratings_file, ratings_separator = "u.data", "\t"
    users_file, users_separator = "u.user", "|"
    user_columns = (USER_ID, "age", "gender", "occupation", "zip_code")


class MovieLens1M(MovieLens):
    """A million ratings, with the same attributes of users."""

    name = "ml-1m"
    ratings_file, ratings_separator = "ratings.dat", "::"
    users_file, users_separator = "users.dat", "::"
    user_columns = (USER_ID, "gender", "age", "occupation", "zip_code")


class MovieLens20M(MovieLens):
    """Twenty million ratings in half stars; users are anonymous."""

    name = "ml-20m"
    ratings_file, ratings_separator = "ratings.csv", ","
    ratings_header = "userId,movieId,rating,timestamp"
    classes_per_star = 2


MOVIELENS: dict[str, type[MovieLens]] = {
    movielens.name: movielens for movielens in (MovieLens100K, MovieLens1M, MovieLens20M)
}
for _name, _movielens in MOVIELENS.items():
    DatasetFactory.register(_name, _movielens)


def _download(url: str, archive: Path) -> None:
    with new_file(archive) as file:  # an interrupted download must not pass for an archive
        try:
            with (
                urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response,
                tqdm(
                    total=int(response.headers.get("Content-Length", 0)) or None,
                    desc=archive.name,
                    unit="B",
                    unit_scale=True,
                    disable=None,
                ) as progress,
            ):
                while chunk := response.read(_CHUNK_BYTES):
                    file.write(chunk)
                    progress.update(len(chunk))
        except OSError as error:
            raise ConnectionError(
                f"could not download {url} ({error}); fetch it by hand, put it at {archive} and run this "
                "again"
            ) from error


def _read_fields(
    path: Path, separator: str, columns: tuple[str, ...], header: str | None
) -> tuple[pl.Series, pl.DataFrame]:
    """Returns the lines after the header and their fields as strings, null where missing.

    This splits lines itself because polars' CSV reader takes no separator of two characters and does not
    report which line is malformed.
    """
    text = path.read_bytes().decode("latin-1").encode()
    lines = pl.read_lines(BytesIO(text), name="line").to_series().str.strip_chars_end("\r")
    if header is not None:
        if lines.is_empty() or lines[0] != header:
            raise ValueError(f"{path}, line 1: expected the header {header!r}")
        lines = lines[1:]
    fields = lines.str.splitn(separator, len(columns)).struct.rename_fields(columns).struct.unnest()
    return lines, fields


def _check_lines(path: Path, first_line: int, lines: pl.Series, is_valid: pl.Series, expected: str) -> None:
    malformed = (~is_valid.fill_null(False)).arg_true()
    if len(malformed):
        index = malformed[0]
        raise ValueError(f"{path}, line {first_line + index}: {lines[index]!r}, expected {expected!r}")


def _sequences(ratings: pl.DataFrame) -> pl.DataFrame:
    """Returns one row per user, by user id, with the user's ratings in order of time."""
    return (
        ratings.sort(USER_ID, TIMESTAMP, maintain_order=True)
        .group_by(USER_ID, maintain_order=True)
        .agg(
            pl.col(ITEM).alias("items"),
            pl.col(RATING).alias("actions"),
            pl.col(TIMESTAMP).alias("timestamps"),
        )
    )
