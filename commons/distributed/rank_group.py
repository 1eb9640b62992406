"""The ranks that balance together, and the groups and channels that they plan and exchange over.

All shufflers, pipelines, logs and checkpoints of a process share one gloo group and one exchange group per
set of ranks. A gloo group of N ranks holds N + 3 descriptors and 3 threads, and an NCCL communicator holds
device memory. In the gloo group, each user has a `Channel`.

The main thread launches every exchange and unshuffle, and TorchRec's collectives of a forward. Autograd's
thread launches those of a backward, while the main thread waits for it. So all ranks launch in one order.
With NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or later) the device keeps to it, too.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..tried_versions import warn_of_untried
from .failures import note_if_lost, portable, raised_on
from .rank_sets import Ranks, Uses, agree_on_sets
from .slow_start import show_if_slow

logger = logging.getLogger(__name__)
_NEVER_SENT = 2**31 - 1  # a tag that no channel has


@dataclass(frozen=True)
class Channel:
    """Gathers host numbers and objects, apart from all other messages over the same group.

    Messages are point-to-point and carry the channel's tag. So threads with a channel each may use one group
    at the same time. On each channel, all ranks must make the same calls in the same order.

    Attributes:
        rank: this process's place among the ranks.
        ranks: ranks of the job that gather.
        group: gloo; None for a single rank.
        tag: message tag, unique to the channel within its group.
    """

    rank: int
    ranks: Ranks
    group: dist.ProcessGroup | None
    tag: int

    @property
    def num_ranks(self) -> int:
        """Ranks that gather."""
        return len(self.ranks)

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """Gathers numbers `[n]`, the same n and dtype on every rank, to `[ranks, n]`.

        Takes ceil(log2(ranks)) rounds of one message each, where gloo's own gather passes rows around a ring
        in ranks - 1. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
        Message-Passing Systems", 1997.
        """
        table = np.empty((self.num_ranks, len(row)), dtype=row.dtype)
        table[0] = row
        rows, there = torch.from_numpy(table), 1  # of this rank, the next one, and so on
        while there < self.num_ranks:
            end = min(2 * there, self.num_ranks)
            source, target = ((self.rank + ahead) % self.num_ranks for ahead in (there, -there))
            with note_if_lost():
                arriving = dist.irecv(rows[there:end], group=self.group, tag=self.tag, group_src=source)
                leaving = dist.isend(rows[: end - there], group=self.group, tag=self.tag, group_dst=target)
                for message in (arriving, leaving):
                    if message is not None:
                        message.wait()
            there = end
        return np.roll(table, self.rank, axis=0)

    def all_gather_objects(self, value: Any, failure: Exception | None = None) -> list[Any]:
        """Gathers anything that pickles, in two gathers: of sizes, and of bytes up to the largest.

        Args:
            value: this rank's.
            failure: error that kept this rank from having one.

        Raises:
            Exception: the failure of the first rank that has one, such as a value that does not pickle; on
                every rank.
        """
        if self.num_ranks == 1 and failure is None:
            return [value]
        try:
            if failure is not None:
                raise failure
            sent = to_bytes(value)
        except Exception as error:
            failure, sent = error, to_bytes(portable(error))
        own = np.frombuffer(sent, dtype=np.uint8)
        header = self.all_gather(np.array([len(own), failure is not None]))
        padded = np.zeros(header[:, 0].max(), dtype=np.uint8)
        padded[: len(own)] = own
        table = self.all_gather(padded)
        objects = [from_bytes(row[:size].tobytes()) for row, size in zip(table, header[:, 0], strict=True)]
        failed = np.flatnonzero(header[:, 1])
        # Those that a rank has from another one are raised only without the first one.
        for rank in sorted(failed, key=lambda rank: raised_on(objects[rank]) != self.ranks[rank])[:1]:
            raise failure if failure is not None and rank == self.rank else objects[rank]
        return objects


class RankGroup:
    """Ranks that balance together; made by `of` and `alone`.

    Attributes:
        ranks: ascending ranks of the job in the group.
        rank: this process's place among them.
        control: gloo, for channels; None for a single rank. Only checkpoints run collectives on it, and
            exchanges on the host of a job on GPUs.
        hosts: names of the hosts of all its ranks.
        ranks_per_node: if each node has this many consecutive ranks of the group; None if nodes do not
            matter, as on one machine, or have different numbers of ranks.
        wait_seconds: host time that this rank has waited for others within forward and backward.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, control: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.rank, self.control = ranks, rank, control
        self._last_tag = 0
        self._groups: dict[str, dist.ProcessGroup] = {}  # by use
        self._base = Channel(rank, ranks, control, tag=0)
        self.hosts: list[str] = self._base.all_gather_objects(socket.gethostname())
        self.ranks_per_node = ranks_per_node(self.hosts)
        self.wait_seconds = 0.0

    @staticmethod
    def of(process_group: dist.ProcessGroup | None = None, uses: Sequence[str] = ()) -> RankGroup:
        """Returns the group of the ranks of `process_group`, or of all ranks. Collective over the job.

        All ranks call it at the same time, each with a group of its own, which may be of this rank alone.
        Without uses, a group of all ranks that has been made is there at once.

        Args:
            process_group: has this rank; None for all ranks.
            uses: what `group_for` gets process groups for, on the job's device.

        Raises:
            ValueError: a rank is not in its `process_group`, or the ranks of one name another; on all ranks.
            RuntimeError: ranks have not come within a minute; on the others, and on those that come later.
        """
        warn_of_untried()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return RankGroup.alone()
        is_in = process_group is None or dist.get_rank(process_group) >= 0
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group))) if is_in else ()
        return _this_job().group(ranks, uses)

    @staticmethod
    def alone() -> RankGroup:
        """Returns the group of this rank only: nothing to communicate."""
        return RankGroup(ranks=(dist.get_rank() if dist.is_initialized() else 0,), rank=0)

    def add_group(self, use: str, group: dist.ProcessGroup) -> None:
        """Takes a process group of these ranks for a use, and connects them. Collective over them."""
        device = job_device()
        if device.type == "cuda":
            _warn_of_launch_order()
        self._groups[use] = group
        # NCCL would connect them in the first step.
        nothing = torch.zeros(self.num_ranks, dtype=torch.uint8, device=device)
        dist.all_to_all_single(torch.empty_like(nothing), nothing, group=group)

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def channel(self) -> Channel:
        """Makes a channel that nothing else uses. Collective over the group."""
        # A rank may have made one that failed on others.
        self._last_tag = int(self._base.all_gather(np.array([self._last_tag + 1])).max())
        return Channel(self.rank, self.ranks, self.control, self._last_tag)

    def all_gather_objects(self, value: Any, failure: Exception | None = None) -> list[Any]:
        """Gathers anything that pickles, while something is constructed; as `Channel` does."""
        return self._base.all_gather_objects(value, failure)

    def group_for(self, use: str, device: torch.device) -> dist.ProcessGroup:
        """Returns the process group of these ranks for one use, such as "exchange", on a device.

        On the host of a job on GPUs, it is that for planning. On GPUs, what runs on another stream needs
        another use, or it would wait for the exchange of a later step.

        Raises:
            KeyError: `of` was not asked for this use.
        """
        if device.type == "cpu" and job_device().type != "cpu":
            assert self.control is not None
            return self.control
        if use not in self._groups:
            raise KeyError(f"no group was made for {use!r}: an extension names it in `uses`")
        return self._groups[use]


@functools.cache
def _warn_of_launch_order() -> None:
    """Warns once per process."""
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1" and dist.get_rank() == 0:
        logger.warning(
            "the exchange adds a communicator to the device, and NCCL_LAUNCH_ORDER_IMPLICIT is not 1. Set it "
            "before the job starts: without it, communicators that wait for each other's kernels may hang"
        )


def close_connections() -> None:
    """Closes this rank's connections for planning; threads that wait for a message there get an error.

    A receive that times out makes gloo do so. Its `abort` and `shutdown` do nothing.
    """
    for group in [] if _job is None else _job.groups.values():
        next_rank, control = (group.rank + 1) % group.num_ranks, group.control
        assert control is not None
        with suppress(RuntimeError):  # it timed out
            control.recv([torch.empty(1, device="cpu")], next_rank, _NEVER_SENT).wait(
                timedelta(milliseconds=1)
            )


def job_device() -> torch.device:
    """Returns the device on which the job's default group communicates: this rank's GPU if it has NCCL.

    The host without a job.
    """
    has_gpus = dist.is_initialized() and torch.cuda.is_available()
    if not has_gpus or job_backend(torch.device("cuda")) != "nccl":
        return torch.device("cpu")
    job: Any = dist.group.WORLD
    return job.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def job_backend(device: torch.device) -> str:
    """Returns the backend of the job's default group on a device; if it has none, the usual one."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return backends.get(device.type) or dist.get_default_backend_for_device(device)


def job_timeout(backend: str) -> timedelta | None:
    """Returns the timeout that the job's default group was started with, on the device of a backend, or on
    another; None if torch does not tell."""
    job: Any = dist.group.WORLD
    for device in ("cpu", "cuda") if backend == "gloo" else ("cuda", "cpu"):
        try:
            timeout = job._get_backend(torch.device(device)).options._timeout
            # NCCL's default is shorter than gloo's, and checkpoints are written over gloo.
            return max(timeout, default_pg_timeout) if backend == "gloo" and device == "cuda" else timeout
        except (RuntimeError, AttributeError):  # no such backend, or one without options
            continue
    return None


def ranks_per_node(nodes: list[str]) -> int | None:
    """Returns the consecutive ranks per node, from each rank's node; None if nodes do not matter."""
    size = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    even = nodes == [node for node in dict.fromkeys(nodes) for _ in range(size)][: len(nodes)]
    return size if even and 1 < size < len(nodes) else None


class _Job:
    """The groups of the job that this process is in. All ranks make the same ones, in the same order.

    Torch names a group after a count of groups that each rank keeps. So ranks that are not in a group take
    part, too, or a later one would have another name on them.

    Attributes:
        world: the job's default group.
        groups: of more than one rank, with this one.
    """

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = world
        self.groups: dict[Ranks, RankGroup] = {}
        self._made: set[tuple[Ranks, str]] = set()  # sets, of all ranks, and what each is connected for

    def group(self, ranks: Ranks, uses: Uses) -> RankGroup:
        """Returns the group of a set, connected for these uses; collective, as `RankGroup.of`."""
        is_there = len(ranks) == dist.get_world_size() and ranks in self.groups
        if uses or not is_there:
            with show_if_slow("waiting for all ranks to make a shuffler"), note_if_lost():
                sets = agree_on_sets(next(_agreements), ranks, uses)
            for each in sets:
                self._connect(*each)
        return self.groups[ranks] if len(ranks) > 1 else RankGroup.alone()

    def _connect(self, ranks: Ranks, uses: Uses) -> None:
        """Connects ranks for planning and for uses, where they are not. Collective over the job."""
        rank = dist.get_rank()
        for use in ("planning", *uses):
            if (ranks, use) in self._made:
                continue
            backend = "gloo" if use == "planning" else job_backend(job_device())
            with show_if_slow(f"connecting {len(ranks)} ranks for {use}"):
                group = dist.new_group(ranks, timeout=job_timeout(backend), backend=backend)
                if rank in ranks and use == "planning":
                    self.groups[ranks] = RankGroup(ranks, ranks.index(rank), group)
                elif rank in ranks:
                    self.groups[ranks].add_group(use, group)
            self._made.add((ranks, use))


# Of all jobs that the process has joined: a store may outlive one of them.
_agreements = itertools.count()
_job: _Job | None = None


def _this_job() -> _Job:
    global _job
    if _job is None or _job.world is not dist.group.WORLD:  # the process may have left another
        _job = _Job(dist.group.WORLD)
    return _job


def to_bytes(value: Any) -> bytes:
    """Pickles anything, with tensors of all dtypes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(pickled: bytes) -> Any:
    """Returns what `to_bytes` was given, on the host."""
    return torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)
