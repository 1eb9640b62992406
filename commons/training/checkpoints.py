"""Checkpoints of a training on many ranks, written beside it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

from commons.distributed.failures import portable, raise_first
from commons.distributed.rank_group import all_gather_object
from commons.training.checkpoint_folder import CheckpointFolder


class Checkpoints:
    """Writes checkpoints in a thread, while training goes on, and reads them. Made collectively.

    `save` copies the state to host memory, for which training waits; files are written behind that. Its
    collectives run on a gloo group of their own, because those of the default group are the training's.

    Args:
        path: folder of the checkpoints, which all ranks see.
        keep: checkpoints to keep; None for all.

    Attributes:
        path: as given.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        self._folder = CheckpointFolder(path)
        self._keep = keep
        self._group = dist.new_group(backend="gloo")
        self._rank = dist.get_rank()
        self._writing: Future[float] | None = None

    def newest(self) -> tuple[Path | None, list[str]]:
        """As `CheckpointFolder.newest`, as rank 0 sees it; the same on all ranks. Collective."""
        found = self._folder.newest() if self._rank == 0 else None
        return all_gather_object(found, self._group)[0]

    def clean(self) -> None:
        """Removes what is unfinished, of runs before this one: for the one run that writes to the folder."""
        if self._rank == 0:
            self._folder.clean()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begins to write what `load` takes. Collective.

        The checkpoint before it must have been asked for by `finish`. A state with a number in it that is not
        finite is not written, and older checkpoints stay: no training could go on from it.
        """
        staged = on_host(state)
        future: Future[float] = Future()

        def write() -> None:
            try:
                future.set_result(self._write(step, staged))
            except BaseException as error:
                future.set_exception(error)

        # A daemon: a rank that fails must not wait for others to take part in a checkpoint.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        self._writing = future

    def finish(self) -> float | None:
        """Waits until the last `save` is written; the seconds that writing took, None if there was none.

        Raises:
            Exception: what kept it from being written, on every rank. Checkpoints before it are untouched.
        """
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Reads a checkpoint into `state`, whose tensors are filled in place. Collective.

        Raises:
            ValueError: it does not have what `state` asks for.
        """
        try:
            with _first_cause():
                dcp.load(state, storage_reader=FileSystemReader(checkpoint), process_group=self._group)
        except OSError:
            raise
        except Exception as error:  # whatever differs, DCP has another error for it
            raise ValueError(
                f"{checkpoint} does not fit this model, its optimiser or their settings: {error}"
            ) from error

    def keys(self, checkpoint: Path) -> set[str]:
        """Names of what a checkpoint holds, nested ones joined by dots."""
        return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)

    def _write(self, step: int, staged: dict[str, Any]) -> float:
        start = time.perf_counter()
        self._together(lambda: _check_finite(staged))
        unfinished = self._together(lambda: self._folder.begin(step) if self._rank == 0 else None)
        # With one thread DCP would overlap copies from a GPU, which there are none of, on that of rank 0.
        writer = FileSystemWriter(unfinished, thread_count=2)
        with _first_cause():
            metadata = dcp.save(staged, storage_writer=writer, process_group=self._group)
        written = {stored.relative_path for stored in (metadata.storage_data or {}).values()}
        self._together(
            lambda: self._folder.publish(unfinished, written, self._keep) if self._rank == 0 else None
        )
        return time.perf_counter() - start

    def _together(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on rank 0, once all ranks are done; an error on any is raised on all."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        results = all_gather_object((result if self._rank == 0 else None, portable(failure)), self._group)
        raise_first([failed for _, failed in results], failure, self._rank)
        return results[0][0]


@contextmanager
def _first_cause() -> Iterator[None]:
    """What DCP raises on all ranks, which is no Exception, as an error that says what went wrong first."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank}: {cause}") from error


def _check_finite(value: Any, name: str = "") -> None:
    """Raises a ValueError that names what is not finite in a staged state of nested dicts and lists."""
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
        smallest, largest = torch.aminmax(value)  # unlike isfinite, it takes no memory
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            raise ValueError(f"{name} has values that are not finite")


def on_host(value: Any) -> Any:
    """A copy of a state in host memory: dicts and lists of tensors, sharded tensors and plain values."""
    if isinstance(value, dict):
        return {key: on_host(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(element) for element in value)
    if isinstance(value, ShardedTensor):
        return _sharded_on_host(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def _sharded_on_host(value: ShardedTensor) -> ShardedTensor:
    metadata = value.metadata()
    on_cpu = []
    for shard in metadata.shards_metadata:
        placement: Any = shard.placement
        placed = f"rank:{placement.rank()}/cpu"
        on_cpu.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement=placed))
    by_offset = {tuple(shard.shard_offsets): shard for shard in on_cpu}
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [
            Shard(shard.tensor.detach().to("cpu", copy=True), by_offset[tuple(shard.metadata.shard_offsets)])
            for shard in value.local_shards()
        ],
        ShardedTensorMetadata(on_cpu, metadata.size, metadata.tensor_properties),
        process_group=value._process_group,
    )
