"""Checkpoints on disk: written in the background, published once complete, read by any number of ranks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from ..distributed.ranks import RankGroup
from .host_copies import HostCopies
from .plain_reader import METADATA_FILE, PlainPlanner, PlainReader

# Lists all other files with their sizes and checksums, and is written last.
CONTENTS_FILE = "contents.json"
# The settings that the state was trained with.
SETTINGS_FILE = "settings.json"
_NAME = re.compile(r"step_(\d+)")
_UNFINISHED = ".unfinished"
_LEFT_OVER = re.compile(r"step_\d+(\.old)?\.unfinished")


class Checkpoints:
    """Writes checkpoints in a thread while training continues, and reads them. Construction is collective.

    `save` blocks training only to copy the state to host memory, which is kept for the next copy. The thread
    then writes the files. It runs collectives on the job's control group, which all objects share, so only
    one of them may save or load at a time.

    Args:
        path: folder of the checkpoints, visible to all ranks.
        keep: number of checkpoints to keep. None means all.
    """

    _writer: ClassVar[Callable[[], Checkpoints | None]] = lambda: None  # the object that saved last

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
        """Returns the newest checkpoint whose files are undamaged, or None if there is no checkpoint.

        Also returns one line for each newer checkpoint, which says how it is damaged. Checks the checksum of
        every file of each checkpoint that it tries, and divides the files among the ranks. Collective.

        Raises:
            ValueError: all checkpoints are damaged.
        """
        found: list[Path] = self._on_rank_0(self._folder.checkpoints)
        problems: list[str] = []
        for checkpoint in found:
            problem = self._problem_with(checkpoint)
            if not problem:
                return checkpoint, problems
            problems.append(f"{checkpoint} is damaged and is skipped: {problem}")
        if problems:
            raise ValueError(
                f"{self.path} has no intact checkpoint. To start over, move them elsewhere. "
                + "; ".join(problems)
            )
        return None, []

    def _problem_with(self, checkpoint: Path) -> str:
        """Returns, on all ranks, the reason a checkpoint must not be read, or an empty string. Collective."""
        contents, problem = self._on_rank_0(lambda: _read_contents(checkpoint))
        mine = sorted(contents)[self._rank :: dist.get_world_size()]
        problems = self._together(
            lambda: next(filter(None, (_change_of(checkpoint / name, contents[name]) for name in mine)), "")
        )
        return problem or next(filter(None, problems), "")

    def clean(self) -> None:
        """Removes unfinished checkpoints. Only the one run that writes to the folder may call this."""
        if self._rank == 0:
            self._folder.clean()

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
        """Starts to write a checkpoint of `state`. Collective. Call `finish` before the next save.

        A state with non-finite tensor values is not written, because no training could continue from it.

        Args:
            step: number of completed steps.
            state: state that `load` will read.
            settings: settings of the training, as values that JSON can represent.

        Raises:
            RuntimeError: the last save, by this object or another, has not been finished.
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
                future.set_result(self._write(step, staged, settings or {}))
            except BaseException as error:
                future.set_exception(error)

        # A daemon, because a rank that fails must not wait for the other ranks' parts of a checkpoint.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        self._writing = future

    def finish(self) -> float | None:
        """Waits for a pending `save`, and returns the seconds that writing took, or None if none is pending.

        Raises:
            Exception: writing failed. All ranks raise the cause. Earlier checkpoints are untouched.
        """
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Reads a checkpoint into `state`, filling its tensors in place. Collective.

        Raises:
            ValueError: the checkpoint does not match `state`, or contains anything but plain data.
        """
        try:
            with _first_cause():
                reader, planner = PlainReader(checkpoint), PlainPlanner()
                dcp.load(state, storage_reader=reader, planner=planner, process_group=self._group)
        except OSError:
            raise
        except Exception as error:  # DCP raises a different type for each kind of mismatch
            raise ValueError(
                f"{checkpoint} does not fit this model, its optimizer or their settings: {error}"
            ) from error

    def keys(self, checkpoint: Path) -> set[str]:
        """Returns the names of a checkpoint's entries, with nested names joined by dots. Collective.

        Raises:
            ValueError: the checkpoint's metadata contains anything but plain data.
        """
        return self._on_rank_0(lambda: set(PlainReader(checkpoint).read_metadata().state_dict_metadata))

    def settings(self, checkpoint: Path) -> dict[str, Any]:
        """Returns the settings that a checkpoint was saved with. Collective."""
        return self._on_rank_0(lambda: json.loads((checkpoint / SETTINGS_FILE).read_text()))

    def _write(self, step: int, staged: dict[str, Any], settings: dict[str, Any]) -> float:
        start = time.perf_counter()
        self._together(lambda: _check_finite(self._copies.tensors))
        try:
            unfinished = self._on_rank_0(lambda: self._folder.begin(step, settings))
            writer = _Writer(unfinished)
            with _first_cause():
                dcp.save(staged, storage_writer=writer, process_group=self._group)
            if self._rank == 0:
                writer.written |= {METADATA_FILE, SETTINGS_FILE}
            checksums = self._together(
                lambda: {name: _size_and_checksum(unfinished / name) for name in writer.written}
            )
            contents = dict(ChainMap(*checksums))
            self._on_rank_0(lambda: self._folder.publish(unfinished, contents, self._keep))
        except Exception:
            if self._rank == 0:  # else a partial checkpoint would keep a full disk full
                self._folder.clean()
            raise
        return time.perf_counter() - start

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0, and returns its result or raises its error on all ranks."""
        return self._together(lambda: action() if self._rank == 0 else None)[0]

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on all ranks, and returns the results by rank. All ranks raise any rank's error."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        return self._channel.all_gather_objects(result, failure)


class _Writer(FileSystemWriter):
    """Writes a rank's part of a checkpoint to one file, in the calling thread.

    An error in one of DCP's own threads would be lost, and the checkpoint with it.
    """

    def __init__(self, path: Path) -> None:
        # Copies nothing ahead, because the state is already on the host.
        super().__init__(path, thread_count=1, per_thread_copy_ahead=0)
        self.written: set[str] = set()  # file names

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes this rank's part of the plan."""
        try:
            results = super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save hides that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        self.written = {result.storage_data.relative_path for result in results.wait()}
        return results


@contextmanager
def _first_cause() -> Iterator[None]:
    """Re-raises CheckpointException, a BaseException, as a RuntimeError naming the lowest failing rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank}: {cause}") from error


def _check_finite(tensors: Mapping[tuple[Hashable, ...], torch.Tensor]) -> None:
    """Raises a ValueError that names the first tensor of a staged state with non-finite values."""
    for path, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            smallest, largest = torch.aminmax(tensor)  # unlike isfinite, it allocates nothing
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                raise ValueError(f"{'.'.join(map(str, path))} has values that are not finite")


class CheckpointFolder:
    """A folder of checkpoints, managed by one process. A single rename publishes each one as `step_N`.

    Interrupted jobs leave folders named `step_N.unfinished`, which are never read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int, settings: dict[str, Any]) -> Path:
        """Removes unfinished checkpoints, and returns a new unfinished folder that has the settings file."""
        self.clean()
        unfinished = self._path / f"step_{step}{_UNFINISHED}"
        unfinished.mkdir(parents=True)
        _write_json(unfinished / SETTINGS_FILE, settings)
        return unfinished

    def publish(self, unfinished: Path, contents: dict[str, _Checksum], keep: int | None) -> Path:
        """Turns a folder from `begin` into a checkpoint, and removes checkpoints beyond the newest `keep`.

        Also removes checkpoints of later steps: they are damaged, or training went back to before them.

        Raises:
            FileNotFoundError: the folder lacks a file that a rank wrote and `contents` lists.
        """
        if missing := sorted(set(contents) - {path.name for path in unfinished.iterdir()}):
            raise FileNotFoundError(
                f"{unfinished} has no {missing[0]}, which a rank has written: all nodes must see the folder"
            )
        _write_json(unfinished / CONTENTS_FILE, contents)
        _sync(unfinished)
        published = self._path / unfinished.name.removesuffix(_UNFINISHED)
        if published.exists():
            self._doom(published)
        os.rename(unfinished, published)
        _sync(self._path)
        others = self.checkpoints()
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
        """Renames a checkpoint for `clean` to remove, so that it never looks intact while half removed."""
        doomed = checkpoint.with_name(f"{checkpoint.name}.old{_UNFINISHED}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(checkpoint, doomed)

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints, intact or damaged, newest first."""
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


_Checksum = list[int | str]  # a file's size, and its SHA-256 in hexadecimal digits


def _size_and_checksum(path: Path) -> _Checksum:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def _change_of(path: Path, written: _Checksum) -> str:
    """Returns how a file has changed since it was written, or an empty string if it has not."""
    try:
        size = path.stat().st_size
        if size != written[0]:
            return f"{path.name} has {size} bytes, expected {written[0]} bytes"
        return "" if _size_and_checksum(path) == written else f"{path.name} has changed since it was written"
    except OSError as error:
        return f"{path.name} cannot be read ({error})"


def _read_contents(checkpoint: Path) -> tuple[dict[str, _Checksum], str]:
    """Returns a checkpoint's list of files, or an empty list and the reason it cannot be read."""
    try:
        contents = json.loads((checkpoint / CONTENTS_FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{CONTENTS_FILE} cannot be read ({error})"
    if not isinstance(contents, dict) or not {METADATA_FILE, SETTINGS_FILE} <= set(contents):
        return {}, f"{CONTENTS_FILE} does not list its files"
    for name, checksum in contents.items():
        if not isinstance(checksum, list) or list(map(type, checksum)) != [int, str]:
            return {}, f"{CONTENTS_FILE} has {checksum!r} for {name}, expected its bytes and SHA-256"
    return contents, ""


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flushes a folder's entries to disk, so that they survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
