"""Files that preprocessors write, complete or not at all, and never in place of what is a user's."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_SPILLED = re.compile(r"(run|part)-\d+\.parquet")


@contextmanager
def replaced_files(out_dir: Path, names: Sequence[str], inputs: Sequence[Path]) -> Iterator[Path]:
    """Yields a temporary folder; on success its files `names` replace those of the same name in `out_dir`.

    Readers never see files of two runs together: the old files go first, then the new ones arrive in the
    order of `names`. An error leaves the old files as they were. The folder lies in `out_dir`, and also
    holds what the caller spills to disk; a later run removes what a killed one left there.

    Raises:
        FileExistsError: as `check_replaceable`, or the folder has files that no run spills.
    """
    check_replaceable(out_dir, names, inputs)
    unfinished = out_dir / ".unfinished"
    if unfinished.is_symlink() or (unfinished.exists() and not unfinished.is_dir()):
        raise FileExistsError(f"{unfinished} is no folder, and temporary files go there: move it elsewhere")
    if unfinished.exists():
        for path in unfinished.iterdir():
            if path.name not in names and not _SPILLED.fullmatch(path.name):
                raise FileExistsError(
                    f"{path} is not of an earlier run: move it out of this temporary folder"
                )
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        check_replaceable(out_dir, names, inputs)
        for name in names:
            (out_dir / name).unlink(missing_ok=True)
        for name in names:
            (unfinished / name).rename(out_dir / name)
    finally:
        shutil.rmtree(unfinished)


def check_replaceable(out_dir: Path, names: Sequence[str], inputs: Sequence[Path]) -> None:
    """Checks that each of these outputs is absent, or may be of an earlier run.

    Raises:
        FileExistsError: one is a link, is no file, or is an input.
        NotADirectoryError: a file is where the folder should be.
    """
    check_folder(out_dir, "--out")
    for path in (out_dir / name for name in names):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            kind = "a link" if path.is_symlink() else "no file"
            raise FileExistsError(f"{path} is {kind}, and would be replaced: move it, or use another --out")
        for source in inputs:
            if path.exists() and source.exists() and path.samefile(source):
                raise FileExistsError(f"{path} is an input, and would be replaced: use another --out")


def check_folder(folder: Path, option: str) -> None:
    """Checks that a folder exists, or may be made; `option` is the one that names it.

    Raises:
        NotADirectoryError: a file is there, or above.
        FileNotFoundError: a link is there, and what it leads to is not.
    """
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if not is_absent(place):
            raise NotADirectoryError(f"{option} {folder}: {place} is a file, expected a folder")


def is_absent(path: Path) -> bool:
    """Returns whether there is nothing at a path.

    Raises:
        FileNotFoundError: a link is there, and what it leads to is not, perhaps only now.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a link to {os.readlink(path)}, which does not exist: mend or remove the link"
        )
    return not path.exists()


def raw_file(folders: Sequence[Path], *names: str) -> Path | None:
    """Returns the first file of these names in the folders, maybe compressed by gzip; None without any."""
    paths = (folder / file for folder in folders for name in names for file in (name, f"{name}.gz"))
    return next((path for path in paths if not is_absent(path)), None)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` on success; after an error there is none.

    Raises:
        FileExistsError: there is one by then, which stays.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        part = Path(folder) / path.name
        with part.open("wb") as file:
            yield file
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "was put there meanwhile; run this again", str(path))
        part.rename(path)
