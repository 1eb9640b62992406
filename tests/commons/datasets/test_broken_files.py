"""A broken raw file of any format ends its preprocessor in one line that names the file."""

import gzip
import urllib.error
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.commons.datasets.raw_files import FORMATS, RawFiles, error_of

# By format, what is between the fields of its first file.
SEPARATORS = {
    "ml-20m": ",",
    "u.data": "\t",
    "u.user": "|",
    "ratings.dat": "::",
    "users.dat": "::",
    "log": ",",
    "users": ",",
    "interactions": ", ",
}


def in_last_line(change: Callable[[list[str]], list[str]]) -> Callable[[list[list[str]]], list[list[str]]]:
    return lambda rows: [*rows[:-1], change(rows[-1])]


# How the fields of a file's lines are broken.
FIELDS = {
    "missing column": lambda rows: [row[1:] for row in rows],
    "letters in a number": in_last_line(lambda row: ["x", *row[1:]]),
    "null bytes": in_last_line(lambda row: ["\0", *row[1:]]),
    "short row": in_last_line(lambda row: row[:-1]),
    "long row": in_last_line(lambda row: [*row, "1"]),
    "wrong separator": lambda rows: [[";".join(row)] for row in rows],
}
BYTES = {
    "empty file": lambda text: b"",
    "wrong encoding": lambda text: text.decode().encode("utf-16"),
    "other bytes": lambda text: gzip.compress(text)[2:],
}


def broken(kind: str, text: bytes, separator: str) -> bytes:
    if kind in BYTES:
        return BYTES[kind](text)
    rows = FIELDS[kind]([line.split(separator) for line in text.decode().splitlines()])
    return "".join(f"{separator.join(row)}\n" for row in rows).encode()


def assert_refused(raw: RawFiles, folder, name: str) -> None:
    error = error_of(raw.main, *raw.arguments(folder), "--out", folder / "out")
    assert str(folder) in error and name in error, error
    assert not list((folder / "out").glob("*")) and not list((folder / "out").glob(".*"))


@pytest.mark.parametrize("kind", [*FIELDS, *BYTES])
@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_text(name, kind, tmp_path):
    raw = FORMATS[name]
    path = raw.write(tmp_path, lambda text: broken(kind, text, SEPARATORS[name]))
    assert_refused(raw, tmp_path, str(path))


@pytest.mark.parametrize("name", FORMATS)
def test_gzip_that_is_cut(name, tmp_path):
    (file, text), *others = FORMATS[name].files.items()
    raw = replace(FORMATS[name], files={f"{file}.gz": gzip.compress(text)[:-9], **dict(others)})
    raw.write(tmp_path)
    assert_refused(raw, tmp_path, f"{file}.gz")


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_absent_or_a_folder(name, is_folder, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    raw = FORMATS[name]
    path = raw.write(tmp_path)
    path.unlink()
    if is_folder:
        path.mkdir()
    assert_refused(raw, tmp_path, path.name)
