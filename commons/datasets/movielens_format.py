"""The official file formats of MovieLens, and reading them."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import polars as pl

USER_ID, ITEM, RATING, TIMESTAMP = "user_id", "movie_id", "rating", "timestamp"


@dataclass(frozen=True)
class MovieLensFormat:
    """How one MovieLens dataset is written.

    Attributes:
        dataset: the dataset's name, which is also its archive's.
        ratings_file: with the columns user, item, rating and Unix time.
        ratings_separator: between those columns.
        ratings_header: first line of `ratings_file`, or None if it starts with data.
        classes_per_star: ratings are multiples of 1 ÷ this, up to 5 stars.
        users_file: with `user_columns`; None if nothing is known of users.
        users_separator: between those columns.
        user_columns: the user id among them.
    """

    dataset: str
    ratings_file: str
    ratings_separator: str
    ratings_header: str | None = None
    classes_per_star: int = 1
    users_file: str | None = None
    users_separator: str = ""
    user_columns: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        """The files that a preparation reads."""
        return [self.ratings_file] if self.users_file is None else [self.ratings_file, self.users_file]

    @property
    def num_classes(self) -> int:
        """Different ratings, of which class 0 is the lowest."""
        return 5 * self.classes_per_star

    @property
    def positive_class(self) -> int:
        """The class of 4 stars."""
        return 4 * self.classes_per_star - 1


FORMATS = {
    movielens.dataset: movielens
    for movielens in (
        MovieLensFormat(
            dataset="ml-100k",
            ratings_file="u.data",
            ratings_separator="\t",
            users_file="u.user",
            users_separator="|",
            user_columns=(USER_ID, "age", "gender", "occupation", "zip_code"),
        ),
        MovieLensFormat(
            dataset="ml-1m",
            ratings_file="ratings.dat",
            ratings_separator="::",
            users_file="users.dat",
            users_separator="::",
            user_columns=(USER_ID, "gender", "age", "occupation", "zip_code"),
        ),
        MovieLensFormat(
            dataset="ml-20m",
            ratings_file="ratings.csv",
            ratings_separator=",",
            ratings_header="userId,movieId,rating,timestamp",
            classes_per_star=2,
        ),
    )
}


def read_ratings(raw_dir: Path, movielens: MovieLensFormat) -> pl.DataFrame:
    """The ratings in file order: Int32 columns user, item and rating (class + 1), Int64 time.

    Raises:
        ValueError: a line is malformed, or the file has no ratings; names the file and the line.
    """
    path = raw_dir / movielens.ratings_file
    columns = (USER_ID, ITEM, RATING, TIMESTAMP)
    lines, fields = _read_fields(path, movielens.ratings_separator, columns, movielens.ratings_header)
    rating = pl.col(RATING).cast(pl.Float64, strict=False) * movielens.classes_per_star
    ratings = fields.select(
        pl.col(USER_ID).cast(pl.Int32, strict=False),
        pl.col(ITEM).cast(pl.Int32, strict=False),
        pl.when(rating == rating.round()).then(rating).cast(pl.Int32, strict=False).alias(RATING),
        pl.col(TIMESTAMP).cast(pl.Int64, strict=False),
    )
    is_valid = (
        (pl.col(USER_ID) >= 1)
        & (pl.col(ITEM) >= 1)
        & pl.col(RATING).is_between(1, movielens.num_classes)
        & pl.col(TIMESTAMP).is_not_null()
    )
    expected = movielens.ratings_separator.join(("user", "item", "rating", "timestamp"))
    _check_lines(path, lines, ratings.select(is_valid).to_series(), expected, movielens.ratings_header)
    if ratings.is_empty():
        raise ValueError(f"{path} has no ratings")
    return ratings


def read_users(raw_dir: Path, movielens: MovieLensFormat) -> pl.DataFrame:
    """The users in file order: Int32 columns user id and age, and string columns.

    Raises:
        ValueError: a line is malformed, or a user has two; names the file and the line.
    """
    assert movielens.users_file is not None
    path = raw_dir / movielens.users_file
    lines, fields = _read_fields(path, movielens.users_separator, movielens.user_columns, header=None)
    users = fields.with_columns(pl.col(USER_ID, "age").cast(pl.Int32, strict=False))
    is_valid = (
        (pl.col(USER_ID) >= 1)
        & pl.col(USER_ID).is_first_distinct()
        & (pl.col("age") >= 0)
        & pl.all_horizontal(pl.col(pl.String).str.len_bytes() > 0)
        # The last column takes what surplus columns there are.
        & ~pl.col(movielens.user_columns[-1]).str.contains(movielens.users_separator, literal=True)
    )
    expected = movielens.users_separator.join(movielens.user_columns)
    _check_lines(path, lines, users.select(is_valid).to_series(), f"{expected}, one line per user", None)
    return users


def _read_fields(
    path: Path, separator: str, columns: tuple[str, ...], header: str | None
) -> tuple[pl.Series, pl.DataFrame]:
    """The lines behind the header, and their fields as strings; missing ones are null.

    Lines are split here rather than by polars' CSV reader, which takes no separator of two characters and
    does not say which line is malformed.
    """
    text = path.read_bytes().decode("latin-1").encode()
    lines = pl.read_lines(BytesIO(text), name="line").to_series().str.strip_chars_end("\r")
    if header is not None:
        if lines.is_empty() or lines[0] != header:
            raise ValueError(f"{path}, line 1: expected the header {header!r}")
        lines = lines[1:]
    fields = lines.str.splitn(separator, len(columns)).struct.rename_fields(columns).struct.unnest()
    return lines, fields


def _check_lines(
    path: Path, lines: pl.Series, is_valid: pl.Series, expected: str, header: str | None
) -> None:
    malformed = (~is_valid.fill_null(False)).arg_true()
    if len(malformed):
        index = malformed[0]
        number = index + (1 if header is None else 2)
        raise ValueError(f"{path}, line {number}: {lines[index]!r}, expected {expected!r}")
