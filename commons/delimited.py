"""Reads delimited text files by column names, and reports where and how a file is malformed."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import reprlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader, BytesIO
from pathlib import Path

import polars as pl

# Separators that a header may use.
_SEPARATORS = (",", "\t", ";", "|")
_GZIP = b"\x1f\x8b"
_NO_TEXT = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"BZh": "compressed by bzip2: unpack it, or compress it by gzip",
    b"\xfd7zXZ\x00": "compressed by xz: unpack it, or compress it by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, or compress it by gzip",
    b"PAR1": "a Parquet file: write it as text first",
}
_PEEKED_BYTES = 4096
_BLOCK_BYTES = 1 << 25
# Lines are split this many at a time, because their fields take several times the memory of the text.
_SPLIT_LINES = 1 << 15
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Column:
    """A column to read.

    Attributes:
        name: name in the header. A file without a header uses it only in messages.
        value: expression of the field's value, where `pl.col(name)` is its text; null if it is malformed.
        expected: description of the form that the field must have.
    """

    name: str
    value: pl.Expr
    expected: str


def integer(name: str, least: int, most: int = 2**63 - 1) -> Column:
    """Returns a column of integers, Int64, from `least` to `most`, inclusive."""
    value = pl.col(name).cast(pl.Int64, strict=False)
    in_range = pl.when(value.is_between(least, most)).then(value).alias(name)
    return Column(name, in_range, f"an integer from {least} to {most}")


@dataclass(frozen=True)
class Text:
    """Consecutive lines of a file.

    Attributes:
        path: the file.
        first_line: number of the first line, counted from 1.
        num_bytes: size of the lines in the file, compressed if the file is.
        lines: String `[lines]`, without line ends.
    """

    path: Path
    first_line: int
    num_bytes: int
    lines: pl.Series

    def malformed(self, row: int, reason: str) -> ValueError:
        """Returns an error that names the file and the line at `row`, and shows it."""
        return ValueError(f"{self.path}, line {self.first_line + row}: {shown(self.lines[row])}: {reason}")


def shown(value: object) -> str:
    """Returns the `repr` of a value on one line, with its middle left out if it is long."""
    text = reprlib.Repr()
    text.maxstring = text.maxother = _SHOWN_CHARACTERS
    text.maxlist = 50
    return text.repr(value)


def read_lines(path: Path) -> Iterator[Text]:
    """Reads a text file block by block, so that memory does not grow with the file.

    The file may be compressed by gzip. A byte order mark, and blank lines at the end, are left out. A block
    that is not UTF-8 counts as Latin-1.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is a folder, UTF-16 or not text, or its gzip data is damaged. Names the file.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected a file")
    first_line, blank = 1, b""
    with path.open("rb") as file, _opened(path, file) as stream:
        position = 0
        while text := stream.read(_BLOCK_BYTES):
            text = b"".join((blank, text, stream.readline()))
            end = _end_of_lines(text)
            text, blank = text[:end], text[end:]
            if not text:
                continue
            lines = pl.read_lines(BytesIO(_utf8(text))).to_series().str.strip_chars_end("\r")
            del text  # the lines have a copy
            yield Text(path, first_line, file.tell() - position, lines)
            position = file.tell()
            first_line += len(lines)


def _end_of_lines(text: bytes) -> int:
    """Returns where the blank lines at the end begin. They end the file unless more text follows."""
    tail = text[-_PEEKED_BYTES:]  # stripping the whole text would copy it
    written = len(text) - len(tail) + len(tail.rstrip()) if tail.strip() else len(text.rstrip())
    return written and (text.find(b"\n", written) + 1 or len(text))


@contextmanager
def _opened(path: Path, file: BufferedReader) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Yields the file's text as a stream that starts after any byte order mark."""
    compressed = file.peek(len(_GZIP)).startswith(_GZIP)
    stream = gzip.GzipFile(fileobj=file) if compressed else file
    try:
        start = stream.peek(_PEEKED_BYTES)[:_PEEKED_BYTES]
        for mark, found in _NO_TEXT.items():
            if start.startswith(mark):
                raise ValueError(f"{path} is {found}")
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
            zeros = " and has zero bytes" if b"\0" in start else ""
            raise ValueError(
                f"{path} begins with {start[:12]!r}{zeros}, as UTF-16 does: expected UTF-8, as "
                "iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE writes it"
            )
        if start.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}; expected a whole gzip file") from error


def _utf8(text: bytes) -> bytes:
    try:
        if not text.isascii():
            text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1").encode()
    return text


def read_blocks(
    path: Path, columns: Sequence[Column], separator: str | None = None
) -> Iterator[tuple[Text, pl.DataFrame]]:
    """Reads a table block by block.

    Without `separator`, the first line is a header. It names the columns, in any order and possibly with
    others, and the separator is the one between them. With `separator`, there is no header, and each line has
    exactly `columns`, in order. Fields may be in double quotes, unless the separator has two characters.

    Yields:
        Lines after the header, and a table of the columns with one row per line.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not text, its header does not name each column once, or a line is malformed.
            Names the file and the line, and shows the text found and the form expected.
    """
    names = [column.name for column in columns]
    places, num_fields = {name: place for place, name in enumerate(names)}, len(names)
    for text in read_lines(path):
        if separator is None:
            separator, header = _header(text, names)
            places, num_fields = {name: header.index(name) for name in names}, len(header)
            text = replace(text, first_line=2, lines=text.lines[1:])
        yield text, _values(text, columns, separator, places, num_fields)
    if separator is None:
        raise ValueError(f"{path} is empty: expected a header with the columns {shown(names)}")


def read_table(path: Path, columns: Sequence[Column], separator: str | None = None) -> pl.DataFrame:
    """Reads a whole table at once, as `read_blocks` does block by block.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: `read_blocks` raises one, or there are no lines, apart from a header.
    """
    blocks = [values for _, values in read_blocks(path, columns, separator)]
    if not sum(map(len, blocks)):
        after = " after its header" if separator is None else ""
        raise ValueError(f"{path} has no lines{after}: expected at least one")
    return pl.concat(blocks, rechunk=True)


def header_names(path: Path) -> list[str]:
    """Returns the names in the first line of a file, split at the separator that yields the most names.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty or not text.
    """
    for text in read_lines(path):
        return max((_fields(text.lines[0], separator) for separator in _SEPARATORS), key=len)
    raise ValueError(f"{path} is empty: expected a header, the names of its columns")


def _header(text: Text, names: list[str]) -> tuple[str, list[str]]:
    """Returns the separator and the names of all columns."""
    line = text.lines[0]
    headers = {separator: _fields(line, separator) for separator in _SEPARATORS}
    separator = max(headers, key=lambda separator: len(set(names) & set(headers[separator])))
    header = headers[separator]
    for name in names:
        if header.count(name) != 1:
            found = "no column" if name not in header else f"{header.count(name)} columns"
            raise text.malformed(
                0, f"{found} {name!r}, expected a header with the columns {', '.join(map(repr, names))}"
            )
    return separator, header


def _fields(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error:
        return []


def _values(
    text: Text, columns: Sequence[Column], separator: str, places: dict[str, int], num_fields: int
) -> pl.DataFrame:
    """Returns the columns' values, one row per line. Raises a ValueError for the first line with a null."""
    parts = []
    for start in range(0, max(len(text.lines), 1), _SPLIT_LINES):
        lines = text.lines.slice(start, _SPLIT_LINES)
        quoted = len(separator) == 1 and lines.str.contains('"', literal=True).any()
        split = _split_quoted if quoted else _split
        fields = split(lines, separator, places, num_fields)
        part = fields.select(column.value.alias(column.name) for column in columns)
        is_malformed = part.select(pl.any_horizontal(pl.all().is_null())).to_series()
        for row in is_malformed.arg_true()[:1]:
            reason = _reason(fields[row], part[row], columns, separator, num_fields)
            raise text.malformed(start + row, reason)
        parts.append(part)
    return pl.concat(parts)


def _split(lines: pl.Series, separator: str, places: dict[str, int], num_fields: int) -> pl.DataFrame:
    """Returns the fields at `places`, by name. They are null unless the line has `num_fields` fields."""
    fields = pl.col("field")
    # One field more than expected shows whether a line has too many.
    last, surplus = (fields.struct.field(f"field_{place}") for place in (num_fields - 1, num_fields))
    is_whole = last.is_not_null() & surplus.is_null()
    split = lines.str.split_exact(separator, num_fields).alias("field").to_frame()
    return split.select(
        pl.when(is_whole).then(fields.struct.field(f"field_{place}")).alias(name)
        for name, place in places.items()
    )


def _split_quoted(lines: pl.Series, separator: str, places: dict[str, int], num_fields: int) -> pl.DataFrame:
    """Returns the same as `_split`, for lines whose fields may be quoted."""
    plain = f'[^"{re.escape(separator)}]*'
    quoted = '(?:[^"]|"")*'
    patterns = [f'(?:"{quoted}"|{plain})'] * num_fields
    for place in places.values():
        patterns[place] = f'(?:"(?P<quoted_{place}>{quoted})"|(?P<plain_{place}>{plain}))'
    groups = pl.col("groups").struct
    found = lines.str.extract_groups(f"^{re.escape(separator).join(patterns)}$").alias("groups").to_frame()
    return found.select(
        pl.coalesce(
            groups.field(f"quoted_{place}").str.replace_all('""', '"', literal=True),
            groups.field(f"plain_{place}"),
        ).alias(name)
        for name, place in places.items()
    )


def _reason(
    fields: pl.DataFrame, values: pl.DataFrame, columns: Sequence[Column], separator: str, num_fields: int
) -> str:
    """Describes what is wrong with the fields of one malformed line."""
    names = ", ".join(column.name for column in columns)
    as_expected = f": {names}" if num_fields == len(columns) else ", as many as the header has"
    for column in columns:
        field = fields[column.name][0]
        if field is None:
            return f"expected {num_fields} fields separated by {separator!r}{as_expected}"
        if values[column.name][0] is None:
            break
    return f"{column.name} is {shown(field)}, expected {column.expected}"
