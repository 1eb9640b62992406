"""Checkpoints on disk: which there are, which of them are whole, and how one comes to be."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

# Lists the other files with their sizes; written when all of them are.
CONTENTS_FILE = "contents.json"
_NAME = re.compile(r"step_(\d+)")
_UNFINISHED = ".unfinished"
_LEFT_OVER = re.compile(r"step_\d+(\.old)?\.unfinished")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, each a folder `step_N` in it that appears by one rename when it is whole.

    What an interrupted job leaves is called `step_N.unfinished`, and is never read.

    Attributes:
        path: of the folder.
    """

    path: Path

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files are all there and as long as they were written; None if none is.

        Also, one line each, what is wrong with those that are newer.
        """
        problems: list[str] = []
        for checkpoint in sorted(self._checkpoints(), key=step_of, reverse=True):
            problem = _problem_with(checkpoint)
            if not problem:
                return checkpoint, problems
            problems.append(f"{checkpoint} is not whole and is passed over: {problem}")
        return None, problems

    def begin(self, step: int) -> Path:
        """An empty folder to write a checkpoint to; one that was left there is removed."""
        unfinished = self.path / f"step_{step}{_UNFINISHED}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        return unfinished

    def publish(self, unfinished: Path, written: set[str], keep: int | None) -> Path:
        """Makes a folder that `begin` gave, and that is written, a checkpoint; removes older ones.

        Newer ones, which were not whole or which training went back behind, are removed too.

        Args:
            unfinished: the folder.
            written: the files that all ranks have written.
            keep: checkpoints to keep; None for all.

        Raises:
            FileNotFoundError: a file is not in the folder.
        """
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        if missing := sorted(written - set(sizes)):
            raise FileNotFoundError(
                f"{unfinished} has no {missing[0]}, which a rank has written: all nodes must see the folder"
            )
        contents = unfinished / CONTENTS_FILE
        with contents.open("w") as file:
            json.dump(sizes, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        published = self.path / unfinished.name.removesuffix(_UNFINISHED)
        if published.exists():  # one that was not whole, or training went back behind it
            os.rename(published, self._doomed(published))
        os.rename(unfinished, published)
        _sync(self.path)
        others = sorted(self._checkpoints(), key=step_of, reverse=True)
        newer = [other for other in others if step_of(other) > step_of(published)]
        older = [other for other in others if step_of(other) < step_of(published)]
        for other in newer + ([] if keep is None else older[keep - 1 :]):
            os.rename(other, self._doomed(other))
        self.clean()
        return published

    def clean(self) -> None:
        """Removes what is unfinished."""
        if self.path.exists():
            for path in self.path.iterdir():
                if _LEFT_OVER.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _doomed(self, checkpoint: Path) -> Path:
        """Where a checkpoint goes to be removed: half removed, it must not look like one."""
        doomed = checkpoint.with_name(f"{checkpoint.name}.old{_UNFINISHED}")
        shutil.rmtree(doomed, ignore_errors=True)
        return doomed

    def _checkpoints(self) -> list[Path]:
        if not self.path.exists():
            return []
        return [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was written behind."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is no checkpoint: expected a folder named step_N")
    return int(match[1])


def _problem_with(checkpoint: Path) -> str:
    """What keeps a checkpoint from being read; empty if nothing does."""
    contents = checkpoint / CONTENTS_FILE
    try:
        sizes = json.loads(contents.read_text())
    except (OSError, ValueError) as error:
        return f"{CONTENTS_FILE} cannot be read ({error})"
    for name, size in sizes.items():
        file = checkpoint / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            is_there = "is missing" if found is None else f"has {found} bytes"
            return f"{name} {is_there}, expected {size} bytes"
    return ""


def _sync(folder: Path) -> None:
    """Names in a folder survive a crash of the machine from here on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
