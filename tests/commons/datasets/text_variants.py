"""Text files as people have them: what any reader reads as the same text, and what none can read."""

import gzip
import io
import lzma
import zipfile
from collections.abc import Callable

import polars as pl

Change = Callable[[bytes], bytes]


def unchanged(text: bytes) -> bytes:
    return text


def replaced(old: str, new: str) -> Change:
    """Returns a function that replaces text in a file."""
    return lambda text: text.replace(old.encode(), new.encode("latin-1"))


def with_fields(change: Callable[[list[str]], list[str]]) -> Change:
    """Returns a function that changes the fields of each line of a CSV file."""
    return lambda text: "".join(
        ",".join(change(line.split(","))) + "\n" for line in text.decode().splitlines()
    ).encode("latin-1")


def zipped(text: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ratings.csv", text)
    return file.getvalue()


def in_parquet(text: bytes) -> bytes:
    file = io.BytesIO()
    pl.DataFrame({"text": [text]}).write_parquet(file)
    return file.getvalue()


BOM = b"\xef\xbb\xbf"
SAME_TEXT: dict[str, Change] = {
    "as it is": unchanged,
    "gzip of a byte order mark": lambda text: gzip.compress(BOM + text),
    "byte order mark and CRLF": lambda text: BOM + text.replace(b"\n", b"\r\n"),
    "no newline at the end": lambda text: text.removesuffix(b"\n"),
    "blank last lines": lambda text: text + b"\r\n \n\t\n\n",
}
# With the key word of the mend.
NO_TEXT: dict[str, tuple[Change, str]] = {
    "UTF-16": (lambda text: text.decode().encode("utf-16"), "UTF-8"),
    "UTF-16 without a mark": (lambda text: text.decode().encode("utf-16-le"), "UTF-8"),
    "zip": (zipped, "zip"),
    "xz": (lzma.compress, "xz"),
    "Parquet": (in_parquet, "Parquet"),
    "cut gzip": (lambda text: gzip.compress(text)[:-9], "gzip"),
}
