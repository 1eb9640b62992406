"""Locks on the folders that a run writes to, so that two runs never write to the same folder."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch.distributed as dist

from ..distributed.ranks import RankGroup
from .run_log import warn_once

LOCK_FILE = ".lock"
_WAIT_S = 5.0  # a killed run may still be ending on another node


@contextmanager
def locked(folders: dict[str, str]) -> Iterator[None]:
    """While active, no other run can lock these folders, given by setting. Collective.

    Creates missing folders. Rank 0 holds the locks, which the kernel releases even if the process is killed.

    Raises:
        RuntimeError: another run has locked a folder. All ranks raise it.
        OSError: a folder cannot be written to. All ranks raise it.
    """
    with ExitStack() as files:
        failure = None
        if dist.get_rank() == 0:
            try:
                for setting, folder in folders.items():
                    files.enter_context(_lock(setting, Path(folder)))
            except Exception as error:
                failure = error
        RankGroup.of().all_gather_objects(None, failure)
        yield


def _lock(setting: str, folder: Path) -> IO[str]:
    """Returns an open file, which holds the folder's lock until it is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise OSError(
            f"{setting} = {str(folder)!r} cannot be written to: {error.filename}: {error.strerror}"
        ) from None
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            # Not flock, because forked children would share its lock and could outlive the process.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                warn_once(f"{folder} cannot be locked: two runs that write to it go unnoticed ({error})")
                return file
            if time.monotonic() > deadline:
                file.close()
                raise RuntimeError(
                    f"{setting} = {str(folder)!r}: another run writes to this folder; give each run its own"
                ) from None
        time.sleep(0.1)
