"""Checkpoints on disk: written in the background, published when whole, and read by any number of ranks."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

from commons.distributed.failures import portable, raise_first
from commons.distributed.rank_group import RankGroup
from commons.training.host_copies import HostCopies

# Lists the other files with their sizes; written after all of them.
CONTENTS_FILE = "contents.json"
_NAME = re.compile(r"step_(\d+)")
_UNFINISHED = ".unfinished"
_LEFT_OVER = re.compile(r"step_\d+(\.old)?\.unfinished")


class Checkpoints:
    """Writes checkpoints in a thread while training goes on, and reads them. Construction is collective.

    Training waits while `save` copies the state to host memory; files are written after that. The memory of
    that copy is kept for the next one. Collectives run in the thread that writes, on the job's control group,
    which all objects share: only one may save or load at a time.

    Args:
        path: folder of the checkpoints, visible to all ranks.
        keep: checkpoints to keep; None for all.

    Attributes:
        path: as given.
    """

    _writer: ClassVar[Callable[[], Checkpoints | None]] = lambda: None  # the last one that saved

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        self._folder = CheckpointFolder(path)
        self._keep = keep
        ranks = RankGroup.of()
        self._group, self._channel = ranks.control, ranks.channel()
        self._rank = dist.get_rank()
        self._copies = HostCopies()
        self._writing: Future[float] | None = None

    def newest(self) -> tuple[Path | None, list[str]]:
        """Returns `CheckpointFolder.newest` as rank 0 sees it, on all ranks. Collective."""
        found = self._folder.newest() if self._rank == 0 else None
        return self._channel.all_gather_objects(found)[0]

    def clean(self) -> None:
        """Removes unfinished checkpoints of earlier runs; only for the one run that writes to the folder."""
        if self._rank == 0:
            self._folder.clean()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts to write a checkpoint of `state`. Collective; call `finish` between two saves.

        A state with a number that is not finite is not written, because no training could go on from it.

        Raises:
            RuntimeError: `finish` was not called since the last save, by this object or another.
        """
        writer = Checkpoints._writer()
        if writer is not None and writer._writing is not None:
            raise RuntimeError(
                f"save of step {step} before the last checkpoint, to {writer.path}, was finished: call its "
                "finish() first, because both use the same process group"
            )
        Checkpoints._writer = weakref.ref(self)
        staged = self._copies.copy(state)
        future: Future[float] = Future()

        def write() -> None:
            try:
                future.set_result(self._write(step, staged))
            except BaseException as error:
                future.set_exception(error)

        # A daemon: a rank that fails must not wait for the others' part of a checkpoint.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        self._writing = future

    def finish(self) -> float | None:
        """Waits for the last `save`; returns the seconds that writing took, None if there was none.

        Raises:
            Exception: the reason it was not written, on every rank. Earlier checkpoints are untouched.
        """
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Reads a checkpoint into `state`, filling its tensors in place. Collective.

        Raises:
            ValueError: the checkpoint does not match `state`.
        """
        try:
            with _first_cause():
                dcp.load(state, storage_reader=FileSystemReader(checkpoint), process_group=self._group)
        except OSError:
            raise
        except Exception as error:  # DCP raises a different type for each kind of mismatch
            raise ValueError(
                f"{checkpoint} does not fit this model, its optimizer or their settings: {error}"
            ) from error

    def keys(self, checkpoint: Path) -> set[str]:
        """Returns the names of what a checkpoint holds; nested names are joined by dots."""
        return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)

    def _write(self, step: int, staged: dict[str, Any]) -> float:
        start = time.perf_counter()
        self._together(lambda: _check_finite(staged))
        unfinished = self._together(lambda: self._folder.begin(step) if self._rank == 0 else None)
        # With one thread, DCP would overlap copies from rank 0's GPU, and there are none.
        writer = FileSystemWriter(unfinished, thread_count=2)
        with _first_cause():
            metadata = dcp.save(staged, storage_writer=writer, process_group=self._group)
        written = {stored.relative_path for stored in (metadata.storage_data or {}).values()}
        self._together(
            lambda: self._folder.publish(unfinished, written, self._keep) if self._rank == 0 else None
        )
        return time.perf_counter() - start

    def _together(self, action: Callable[[], Any]) -> Any:
        """Returns rank 0's result of `action` after all ranks ran it; raises any rank's error on all."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        mine = result if self._rank == 0 else None, portable(failure)
        results = self._channel.all_gather_objects(mine)
        raise_first([failed for _, failed in results], failure, self._rank)
        return results[0][0]


@contextmanager
def _first_cause() -> Iterator[None]:
    """Re-raises DCP's CheckpointException, which is no Exception, as a RuntimeError with its first cause."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank}: {cause}") from error


def _check_finite(value: Any, name: str = "") -> None:
    """Raises a ValueError that names a tensor of a staged state with values that are not finite."""
    if isinstance(value, dict):
        for key, element in value.items():
            _check_finite(element, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, element in enumerate(value):
            _check_finite(element, f"{name}.{number}")
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            _check_finite(shard.tensor, name)
    elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
        smallest, largest = torch.aminmax(value)  # unlike isfinite, it allocates nothing
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            raise ValueError(f"{name} has values that are not finite")


class CheckpointFolder:
    """A folder of checkpoints, for one process. Each is a folder `step_N` that appears by one rename.

    Interrupted jobs leave folders named `step_N.unfinished`, which are never read.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def newest(self) -> tuple[Path | None, list[str]]:
        """Returns the newest checkpoint whose files are all there in full length; None if there is none.

        Also returns one line for each newer checkpoint, with what is wrong with it.
        """
        problems: list[str] = []
        for checkpoint in self._checkpoints():
            problem = _problem_with(checkpoint)
            if not problem:
                return checkpoint, problems
            problems.append(f"{checkpoint} is not whole and is skipped: {problem}")
        return None, problems

    def begin(self, step: int) -> Path:
        """Returns an empty folder to write a checkpoint to."""
        unfinished = self._path / f"step_{step}{_UNFINISHED}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        return unfinished

    def publish(self, unfinished: Path, written: set[str], keep: int | None) -> Path:
        """Turns a written folder of `begin` into a checkpoint, and removes old ones.

        Removes newer ones, too: they were not whole, or training went back to before them.

        Args:
            unfinished: the folder.
            written: names of the files that all ranks have written.
            keep: checkpoints to keep; None for all.

        Raises:
            FileNotFoundError: a file is not in the folder.
        """
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        if missing := sorted(written - set(sizes)):
            raise FileNotFoundError(
                f"{unfinished} has no {missing[0]}, which a rank has written: all nodes must see the folder"
            )
        with (unfinished / CONTENTS_FILE).open("w") as file:
            json.dump(sizes, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        published = self._path / unfinished.name.removesuffix(_UNFINISHED)
        if published.exists():
            self._doom(published)
        os.rename(unfinished, published)
        _sync(self._path)
        others = self._checkpoints()
        place = others.index(published)
        for other in others[:place] + ([] if keep is None else others[place + keep :]):
            self._doom(other)
        self.clean()
        return published

    def clean(self) -> None:
        """Removes unfinished checkpoints."""
        if self._path.exists():
            for path in self._path.iterdir():
                if _LEFT_OVER.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _doom(self, checkpoint: Path) -> None:
        """Renames a checkpoint that `clean` will remove: half removed, it must not look like one."""
        doomed = checkpoint.with_name(f"{checkpoint.name}.old{_UNFINISHED}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(checkpoint, doomed)

    def _checkpoints(self) -> list[Path]:
        """The checkpoints, newest first."""
        if not self._path.exists():
            return []
        found = [path for path in self._path.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was written."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not a checkpoint: expected a folder named step_N")
    return int(match[1])


def _problem_with(checkpoint: Path) -> str:
    """The reason a checkpoint cannot be read; empty if it can."""
    try:
        sizes = json.loads((checkpoint / CONTENTS_FILE).read_text())
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
    """Makes the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
