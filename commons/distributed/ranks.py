"""Host-to-host messages between ranks, and exceptions of one rank that all ranks raise."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import pickle
import socket
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..warn_once import warn_once

_RAISED_ON, _LOST_HERE = "raised_on_another_rank", "lost_the_connection"
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
    """Returns whether a message of this rank raised this error, because the connection is lost."""
    return _LOST_HERE in error.__dict__


def cause_elsewhere(error: BaseException) -> str | None:
    """Returns a line about the failure of another rank that caused this error; None if there is none."""
    if (rank := raised_on(error)) is not None:
        reason = f"rank {rank} raised {type(error).__name__}, and shows the traceback"
    elif isinstance(error, _LOST) or "gloo/transport" in str(error):
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
            error.__dict__[_LOST_HERE] = True
        raise


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


logger = logging.getLogger(__name__)
_NEVER_SENT = 2**31 - 1  # a tag that no channel uses
# Seconds that ranks wait for one another. The job's own timeout is many minutes, and names no rank.
PATIENCE_S = 60.0

Uses = Collection[str]  # purposes of process groups, such as "exchange"
_PLANNING = "planning"  # the use of the gloo group that channels need
# A rank's set (empty if its process group excludes it), its uses, and torch's count of its process groups.
_Post = tuple[Ranks, Uses, int]
_TOGETHER = (
    "all ranks make theirs at the same time. A rank that keeps its samples makes the same one in a group of "
    "itself, as in own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]]), and no identity shuffler"
)


class RankGroup:
    """Ranks that balance together. `of` and `alone` return one.

    Attributes:
        ranks: ascending ranks of the job in the group.
        rank: this process's index in `ranks`.
        control: gloo process group for channels. None means a single rank. Collectives run on it only for
            checkpoints, and for host exchanges in a GPU job.
        hosts: host name of each rank.
        ranks_per_node: number of consecutive ranks on each node. The last node may have fewer. None means
            that nodes do not matter, as on one machine, or that they are uneven.
        by_use: process group for each use other than planning.
        wait_seconds: host time that this rank has waited for other ranks in forward and backward.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, control: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.rank, self.control = ranks, rank, control
        self._last_tag = 0
        self.by_use: dict[str, dist.ProcessGroup] = {}
        self._base = Channel(rank, ranks, control, tag=0)
        self.hosts: list[str] = self._base.all_gather_objects(socket.gethostname())
        self.ranks_per_node = ranks_per_node(self.hosts)
        self.wait_seconds = 0.0

    @staticmethod
    def of(process_group: dist.ProcessGroup | None = None, uses: Sequence[str] = ()) -> RankGroup:
        """Returns the group of the ranks of `process_group`, or of all ranks. Collective over the job.

        All ranks call it at the same time, each with its own `process_group`. Once the group of all ranks
        exists, a call for it without uses returns it without communication.

        Args:
            process_group: process group that includes this rank. None means all ranks.
            uses: names of the uses that `group_for` will return process groups for.

        Raises:
            ValueError: a rank is not in its `process_group`, or ranks disagree on groups. All ranks raise it.
            RuntimeError: some ranks do not call `of` within a minute. All ranks that call it raise the error.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return RankGroup.alone()
        is_in = process_group is None or dist.get_rank(process_group) >= 0
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group))) if is_in else ()
        return _this_job().group(ranks, uses)

    @staticmethod
    def alone() -> RankGroup:
        """Returns a group of only this rank, which never communicates."""
        return RankGroup(ranks=(dist.get_rank() if dist.is_initialized() else 0,), rank=0)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def channel(self) -> Channel:
        """Makes a channel that nothing else uses. Collective over the group."""
        # Tags may differ, because a rank may have made a channel that failed on other ranks.
        self._last_tag = int(self._base.all_gather(np.array([self._last_tag + 1])).max())
        return Channel(self.rank, self.ranks, self.control, self._last_tag)

    def all_gather_objects(self, value: Any, failure: Exception | None = None) -> list[Any]:
        """Gathers values as `Channel.all_gather_objects` does, for use in constructors."""
        return self._base.all_gather_objects(value, failure)

    def group_for(self, use: str, device: torch.device) -> dist.ProcessGroup:
        """Returns the process group of these ranks for one use, such as "exchange", on a device.

        In a job on GPUs, the planning group serves the host. On GPUs, collectives on another stream need
        a use of their own, or they would wait for the exchange of a later step.

        Raises:
            KeyError: `of` was not called with this use.
        """
        if device.type == "cpu" and job_device().type != "cpu":
            assert self.control is not None
            return self.control
        return self.by_use[use]


def close_connections() -> None:
    """Closes this rank's connections for planning, which raises an error in threads that wait on them.

    gloo closes its connections when a receive times out. Its `abort` and `shutdown` do nothing.
    """
    for group in [] if _job is None else _job.groups.values():
        next_rank, control = (group.rank + 1) % group.num_ranks, group.control
        assert control is not None
        with suppress(RuntimeError):  # the receive timed out
            control.recv([torch.empty(1, device="cpu")], next_rank, _NEVER_SENT).wait(
                timedelta(milliseconds=1)
            )


def job_device() -> torch.device:
    """Returns the device on which the job's default group communicates: this rank's GPU if it has NCCL.

    Otherwise, or without a job, this is the host.
    """
    has_gpus = dist.is_initialized() and torch.cuda.is_available()
    if not has_gpus or job_backend(torch.device("cuda")) != "nccl":
        return torch.device("cpu")
    job: Any = dist.group.WORLD
    return job.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def job_backend(device: torch.device) -> str:
    """Returns the backend of the job's default group for a device, or else torch's default for the device."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return backends.get(device.type) or dist.get_default_backend_for_device(device)


def job_timeout(backend: str) -> timedelta | None:
    """Returns the timeout that the job's default group was started with: that of this backend, or else of the
    group's other backend. None means that torch does not tell."""
    job: Any = dist.group.WORLD
    for device in ("cpu", "cuda") if backend == "gloo" else ("cuda", "cpu"):
        try:
            timeout = job._get_backend(torch.device(device)).options._timeout
            # NCCL's default is shorter than gloo's, and may be too short for writing checkpoints over gloo.
            return max(timeout, default_pg_timeout) if backend == "gloo" and device == "cuda" else timeout
        except (RuntimeError, AttributeError):  # no such backend, or one without options
            continue
    return None


def ranks_per_node(nodes: list[str]) -> int | None:
    """Returns the number of consecutive ranks per node, given each rank's node; see `RankGroup`."""
    size = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    even = nodes == [node for node in dict.fromkeys(nodes) for _ in range(size)][: len(nodes)]
    return size if even and 1 < size < len(nodes) else None


class _Job:
    """The groups of this process's job. All ranks make the same groups, in the same order.

    Torch names a group after a count of groups that each rank keeps. So ranks outside a group take part in
    making it. Otherwise, later groups would have different names on different ranks.
    """

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = world
        # Counts this rank's jobs on this store: a store may outlive a job, and ranks may have had other jobs.
        store = dist.distributed_c10d._get_default_store()
        self._number = store.add(f"workload_balancer/jobs_{dist.get_rank()}", 1)
        self._agreements = itertools.count()
        self.groups: dict[Ranks, RankGroup] = {}  # those that include this rank and others
        self._connected = functools.cache(self._connect)  # the ranks of a set share one group per use

    def group(self, ranks: Ranks, uses: Uses) -> RankGroup:
        """Returns the group of a set, connected for these uses. Collective, as `RankGroup.of` is."""
        is_there = len(ranks) == dist.get_world_size() and ranks in self.groups
        if uses or not is_there:
            with note_if_lost():
                posts = _gather_posts(f"{self._number}_{next(self._agreements)}", ranks, uses)
            _check_posts(posts)
            for each in sorted({of for of, *_ in posts if len(of) > 1}):
                used = {use for of, uses_of_rank, _ in posts if of == each for use in uses_of_rank}
                for use in (_PLANNING, *sorted(used)):
                    self._connected(each, use)
        return self.groups[ranks] if len(ranks) > 1 else RankGroup.alone()

    def _connect(self, ranks: Ranks, use: str) -> None:
        """Makes the process group of a set of ranks for one use. Collective over the job."""
        backend = "gloo" if use == _PLANNING else job_backend(job_device())
        group = dist.new_group(ranks, timeout=job_timeout(backend), backend=backend)
        if dist.get_rank() not in ranks:
            return
        if use == _PLANNING:
            self.groups[ranks] = RankGroup(ranks, ranks.index(dist.get_rank()), group)
            return
        self.groups[ranks].by_use[use] = group
        device, is_fixed = job_device(), os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
        if device.type == "cuda" and not is_fixed and dist.get_rank() == 0:
            warn_once(
                logger,
                "set NCCL_LAUNCH_ORDER_IMPLICIT=1 before the job starts, or communicators may wait for each "
                "other's kernels and hang",
            )
        # This all-to-all connects the ranks. Without it, NCCL would do so in the first step.
        nothing = torch.zeros(len(ranks), dtype=torch.uint8, device=device)
        dist.all_to_all_single(torch.empty_like(nothing), nothing, group=group)


_job: _Job | None = None


def _this_job() -> _Job:
    global _job
    if _job is None or _job.world is not dist.group.WORLD:  # the process may have left an earlier job
        _job = _Job(dist.group.WORLD)
    return _job


def _gather_posts(agreement: str, ranks: Ranks, uses: Uses) -> list[_Post]:
    """Gathers the posts of all ranks over the job's store, under a name that no other agreement has.

    Raises:
        RuntimeError: ranks are missing after `PATIENCE_S` seconds. This rank then takes its post back, so
            that ranks that come later do not go on without it.
    """
    num_ranks, store_of_job = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    store: Any = dist.PrefixStore(f"workload_balancer/sets_{agreement}", store_of_job)
    posts, everyone = [f"post_{of}" for of in range(num_ranks)], tuple(range(num_ranks))
    mine, count = posts[dist.get_rank()], dist.distributed_c10d._world.group_count
    store.set(mine, pickle.dumps((None if ranks == everyone else ranks, uses, count)))  # each rank reads all
    try:
        store.wait(posts, timedelta(seconds=PATIENCE_S))
    except RuntimeError:  # each kind of store raises its own error
        late = [of for of in range(num_ranks) if not store.check([posts[of]])]
        if late:  # otherwise, the last rank has just arrived
            store.delete_key(mine)
            who = f"{ranks_text(late)} {'has' if len(late) == 1 else 'have'}"
            raise RuntimeError(
                f"{who} not made a shuffler within {PATIENCE_S:g} s: {_TOGETHER}. If they are only late, "
                "have all ranks wait for them first, as in dist.barrier()"
            ) from None
    gathered = [pickle.loads(each) for each in store.multi_get(posts)]
    return [(everyone if of is None else of, *others) for of, *others in gathered]


def _check_posts(posts: Sequence[_Post]) -> None:
    """Raises a ValueError, the same on all ranks, unless the ranks of each set name that set."""
    members: dict[Ranks, list[int]] = {}
    for rank, (ranks, *_) in enumerate(posts):
        members.setdefault(ranks, []).append(rank)
    if () in members:
        raise ValueError(f"{ranks_text(members[()])} is not in the process_group it was given")
    for ranks, present in members.items():
        for rank in sorted({*ranks} - {*present})[:1]:
            here, there = (
                ", or a pipeline, for all ranks" if len(each) == len(posts) else f" for {ranks_text(each)}"
                for each in (ranks, posts[rank][0])
            )
            raise ValueError(
                f"rank {present[0]} makes a shuffler{here}, and rank {rank} at the same time one{there}: "
                f"{_TOGETHER}"
            )
    counts = [count for *_, count in posts]
    if len({*counts}) > 1:
        fewest, most = (counts.index(bound(counts)) for bound in (min, max))
        raise ValueError(
            f"torch {torch.__version__} counts {counts[fewest]} process groups on rank {fewest} and "
            f"{counts[most]} on rank {most}, and would name the next one differently: have all ranks of the "
            "job make all groups, without use_local_synchronization=True"
        )


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """Returns "rank 2", "ranks 2 and 3", or "ranks 2, 3 and 96 more"."""
    names = [str(rank) for rank in ranks]
    if len(names) > most:
        names[most - 1 :] = [f"{len(names) - most + 1} more"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
