"""Host-to-host messages between ranks, and exceptions of one rank that all ranks raise."""

from __future__ import annotations

import io
import os
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_RAISED_ON = "raised_on_another_rank"
_LOST = (dist.DistBackendError, dist.DistNetworkError)  # raised by failed messages, and by the job's store

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Channel:
    """Gathers host numbers and objects, separately from all other messages over the same group.

    Messages are point-to-point and carry the channel's tag, so threads with separate channels can share a
    group. On each channel, all ranks must make the same calls in the same order.

    Attributes:
        rank: this process's index in `ranks`.
        ranks: the job's ranks that the channel connects.
        group: gloo process group. None means that there is a single rank.
        tag: message tag, unique to the channel within its group.
    """

    rank: int
    ranks: Ranks
    group: dist.ProcessGroup | None
    tag: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the channel connects."""
        return len(self.ranks)

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """Gathers numbers `[n]` of each rank to `[ranks, n]`. All ranks need the same n and dtype."""
        gathered = self._gather(row.view(np.uint8), np.full(self.num_ranks, row.nbytes))
        return gathered.view(row.dtype).reshape(self.num_ranks, *row.shape)

    def _gather(self, sent: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Gathers the bytes of all ranks, uint8, one rank after another. `sizes` has their numbers of bytes.

        Takes ceil(log2(ranks)) rounds of one message each, where gloo's own ring all-gather takes ranks - 1.
        The algorithm is from Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
        Message-Passing Systems", 1997.
        """
        # This rank's block comes first, and then that of the next rank.
        starts, there = np.append(0, np.cumsum(np.roll(sizes, -self.rank))), 1
        buffer = np.empty(starts[-1], dtype=np.uint8)
        buffer[: len(sent)] = sent
        blocks = torch.from_numpy(buffer)
        while there < self.num_ranks:
            end = min(2 * there, self.num_ranks)
            source, target = ((self.rank + ahead) % self.num_ranks for ahead in (there, -there))
            received, passed_on = blocks[starts[there] : starts[end]], blocks[: starts[end - there]]
            with note_if_lost():
                arriving = dist.irecv(received, group=self.group, tag=self.tag, group_src=source)
                leaving = dist.isend(passed_on, group=self.group, tag=self.tag, group_dst=target)
                for message in (arriving, leaving):
                    if message is not None:
                        message.wait()
            there = end
        return np.roll(buffer, -starts[-self.rank % self.num_ranks])

    def all_gather_objects(self, value: Any, failure: Exception | None = None) -> list[Any]:
        """Gathers any picklable values, by one gather of sizes, and one of bytes.

        Raises:
            Exception: the failure of the first rank that passes one, or whose value does not pickle. Every
                rank raises it.
        """
        if self.num_ranks == 1 and failure is None:
            return [value]
        try:
            if failure is not None:
                raise failure
            sent = to_bytes(value)
        except Exception as error:
            failure, sent = error, _packed(error)
        header = self.all_gather(np.array([len(sent), failure is not None]))
        gathered = self._gather(np.frombuffer(sent, dtype=np.uint8), header[:, 0])
        of_ranks = np.split(gathered, header[:-1, 0].cumsum())
        objects = [
            (_unpacked if has_failed else from_bytes)(of_rank.tobytes())
            for of_rank, has_failed in zip(of_ranks, header[:, 1], strict=True)
        ]
        failed = np.flatnonzero(header[:, 1])
        # An error from the rank that raised it takes precedence over copies that other ranks pass on.
        for rank in sorted(failed, key=lambda rank: raised_on(objects[rank]) != self.ranks[rank])[:1]:
            raise failure if failure is not None and rank == self.rank else objects[rank]
        return objects


def to_bytes(value: Any) -> bytes:
    """Pickles a value with tensors of any dtype, of which plain pickle refuses some, such as uint16."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Returns the value of `to_bytes`."""
    return torch.load(io.BytesIO(data), weights_only=False)


def _packed(error: Exception) -> bytes:
    """Packs an error as its built-in type, its text, its notes, and the rank. A note has the traceback."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    text, notes, rank = type(error).__name__, getattr(error, "__notes__", []), raised_on(error)
    with suppress(Exception):  # `__str__` may raise
        is_key = type(error) is KeyError and len(error.args) == 1  # whose text is the key's `repr`
        of = str(error.args[0] if is_key else error)
        text = of if kind is type(error) else f"{text}: {of}"
    if rank is None:
        where, rank = "".join(traceback.format_exception(error)), _this_rank()
        notes = [*notes, f"raised on rank {rank}:\n{where}"]
    return pickle.dumps((kind, text, notes, rank))


def _unpacked(packed: bytes) -> Exception:
    kind, text, notes, rank = pickle.loads(packed)
    try:
        error = kind(text)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        error = RuntimeError(f"{kind.__name__}: {text}")
    error.__dict__.update({"__notes__": notes, _RAISED_ON: rank})
    return error


def raised_on(error: BaseException) -> int | None:
    """Returns the other rank that raised this error and reports it; None if this rank raised it."""
    return error.__dict__.get(_RAISED_ON)


def is_lost(error: BaseException) -> bool:
    """Returns whether an error tells that the connection to another rank is lost."""
    return isinstance(error, _LOST) or "gloo/transport" in str(error)


def cause_elsewhere(error: BaseException) -> str | None:
    """Returns a line about the failure of another rank that caused this error; None if there is none."""
    if (rank := raised_on(error)) is not None:
        reason = f"rank {rank} raised {type(error).__name__}, and shows the traceback"
    elif is_lost(error):
        reason = (
            "it lost the connection to another rank: that rank's traceback shows the cause, or the signal "
            "that torchrun reports for it, such as -9 if memory ran out; or it left its loop early"
        )
    else:
        return None
    return f"rank {_this_rank()} ends, because {reason}"


@contextmanager
def note_if_lost() -> Iterator[None]:
    """While active, adds a note to errors of lost connections: another rank shows the cause."""
    try:
        yield
    except RuntimeError as error:
        if (line := cause_elsewhere(error)) is not None:
            error.add_note(line)
        raise


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
