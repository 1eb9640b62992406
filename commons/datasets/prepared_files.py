"""Files that preprocessors write, complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_files(out_dir: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yields a temporary folder; on success its files `names` replace those of the same name in `out_dir`.

    Readers never see files of two runs together: the old files go first, then the new ones arrive in the
    order of `names`. An error leaves the old files as they were. The folder lies in `out_dir`, and also
    holds what the caller spills to disk; a later run removes what a killed one left there.
    """
    unfinished = out_dir / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for name in names:
            (out_dir / name).unlink(missing_ok=True)
        for name in names:
            (unfinished / name).rename(out_dir / name)
    finally:
        shutil.rmtree(unfinished)
