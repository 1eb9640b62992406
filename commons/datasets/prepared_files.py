"""Files that preprocessors write, completely or not at all, and never over inputs, links, or folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_files(out_dir: Path, names: Sequence[str], inputs: Sequence[Path]) -> Iterator[Path]:
    """Yields a temporary folder. On success, its files `names` replace the files of these names in `out_dir`.

    Readers never see files of two runs together: all old files are deleted before the new files are moved in,
    in the order of `names`. An error leaves the old files unchanged. The folder is in `out_dir`, and the
    caller may also spill data to it.

    Raises:
        FileExistsError: `check_replaceable` raises it.
    """
    check_replaceable(out_dir, names, inputs)
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out_dir) as folder:
        yield Path(folder)
        check_replaceable(out_dir, names, inputs)
        for name in names:
            (out_dir / name).unlink(missing_ok=True)
        for name in names:
            (Path(folder) / name).rename(out_dir / name)


def check_replaceable(out_dir: Path, names: Sequence[str], inputs: Sequence[Path]) -> None:
    """Checks that each of these outputs is absent, or may be a file of an earlier run.

    Raises:
        FileExistsError: an output is a link, is not a file, or is an input.
        NotADirectoryError, FileNotFoundError: `check_folder` raises it.
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
    """Checks that a folder exists or can be created. `option` names the folder in errors.

    Raises:
        NotADirectoryError: the folder or one of its parents is a file.
        FileNotFoundError: the folder or one of its parents is a broken link.
    """
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if not is_absent(place):
            raise NotADirectoryError(f"{option} {folder}: {place} is a file, expected a folder")


def is_absent(path: Path) -> bool:
    """Returns whether nothing exists at a path.

    Raises:
        FileNotFoundError: the path is a link whose target does not exist, perhaps only for now.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a link to {os.readlink(path)}, which does not exist: mend or remove the link"
        )
    return not path.exists()


def raw_file(folders: Sequence[Path], *names: str) -> Path | None:
    """Returns the first file with one of these names in the folders, plain or gzipped, or None."""
    paths = (folder / file for folder in folders for name in names for file in (name, f"{name}.gz"))
    return next((path for path in paths if not is_absent(path)), None)
