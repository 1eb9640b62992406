"""Paths as a shell reads them, with the home folder and variables, on disks that this process sees."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any


class PathError(ValueError, argparse.ArgumentTypeError):
    """A path names another storage than a disk, or a variable that is not set."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path with `~` and `$VARIABLES` replaced.

    Raises:
        PathError: the path has a scheme, such as "s3://", or a variable is not set, or a user is unknown.
    """
    text = os.fspath(path)
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text):
        raise PathError(
            f"{text!r} is a {scheme[1]} address; expected a path on a disk, as of a folder where the "
            "storage is mounted"
        )
    if os.path.exists(text):  # a name may have a "$"
        return Path(text)
    expanded = os.path.expandvars(os.path.expanduser(text))
    if expanded.startswith("~"):
        raise PathError(f"{text!r} names the home of a user that this machine does not have")
    if unset := re.search(r"\$(\w+|\{\w+\})", expanded):
        raise PathError(f"{text!r} names {unset[0]}, which is not set: export it, or write the path out")
    return Path(expanded)


def expand_paths(settings: Any, *names: str) -> None:
    """Replaces paths among gin settings by what `local_path` returns. Empty ones and None stay. A PathError
    names the setting."""
    for name in names:
        if given := getattr(settings, name):
            try:
                expanded = local_path(given)
            except PathError as error:
                raise PathError(f"{type(settings).__name__}.{name} = {error}") from None
            if expanded != Path(given):  # otherwise, messages show it as it was written
                setattr(settings, name, str(expanded))
