"""The ranks that balance together, and the process groups that they plan and exchange over.

All shufflers, pipelines, logs and checkpoints of a process share one gloo group and one exchange group per
set of ranks. A gloo group of N ranks holds N + 3 descriptors and 3 threads, and an NCCL communicator holds
device memory. In the gloo group, each user has a `Channel`.

Order of launches: the main thread launches every exchange and unshuffle, and TorchRec's collectives of a
forward. Autograd's thread launches those of a backward, DDP's among them, while the main thread waits for it.
So all ranks launch in one order, that of the program. With NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or later)
the device keeps to it, too. Messages between hosts are no part of it, whichever thread sends them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..tried_versions import warn_of_untried
from .channel import Channel
from .failures import show_first_cause_only
from .slow_start import show_if_slow

logger = logging.getLogger(__name__)
_NEVER_SENT = 2**31 - 1  # a tag that no channel has


class RankGroup:
    """Ranks that balance together; made by `of` and `alone`.

    Attributes:
        ranks: ascending ranks of the job in the group.
        rank: this process's place among them.
        control: gloo, for channels; None for a single rank. Only checkpoints run collectives on it.
        hosts: names of the hosts of all its ranks.
        ranks_per_node: if each node has this many consecutive ranks of the group; None if nodes do not
            matter, as on one machine, or have different numbers of ranks.
        wait_seconds: host time that this rank has waited for others within forward and backward.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, control: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.rank, self.control = ranks, rank, control
        self._tags = itertools.count(1)
        self._groups: dict[tuple[str, str], dist.ProcessGroup] = {}  # by use and backend
        self._base = Channel(rank, len(ranks), control, tag=0)
        self.hosts: list[str] = self._base.all_gather_objects(socket.gethostname())
        self.ranks_per_node = ranks_per_node(self.hosts)
        self.wait_seconds = 0.0

    @staticmethod
    def of(process_group: dist.ProcessGroup | None = None) -> RankGroup:
        """Returns the group of the ranks of `process_group`, or of all ranks. Collective over those ranks.

        Raises:
            ValueError: this rank is not in `process_group`.
        """
        warn_of_untried()
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group it was given; a rank balances among the "
                "ranks of a group that it belongs to"
            )
        if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
            return RankGroup.alone()
        show_first_cause_only()
        job = dist.group.WORLD
        if _groups_of_job[0] is not job:  # the process has left a job, and joined another
            _groups_of_job[:] = [job, {}]
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group)))  # as new_group sorts them
        known: dict[tuple[int, ...], RankGroup] = _groups_of_job[1]
        if ranks not in known:
            with show_if_slow(f"connecting {len(ranks)} ranks for planning"):
                named = [0] * len(ranks)
                dist.all_gather_object(named, _groups_named, group=process_group)
                control = _new_group(ranks, "gloo", max(named))
                known[ranks] = RankGroup(ranks, dist.get_rank(control), control)
        return known[ranks]

    @staticmethod
    def alone() -> RankGroup:
        """Returns the group of this rank only: nothing to communicate."""
        return RankGroup(ranks=(dist.get_rank() if dist.is_initialized() else 0,), rank=0)

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def channel(self) -> Channel:
        """Makes a channel that nothing else uses. Collective over the group."""
        mine = np.array([next(self._tags)])
        tag = int(self._base.all_gather(mine).max())  # a rank may have made one that failed on others
        self._tags = itertools.count(tag + 1)
        return Channel(self.rank, self.num_ranks, self.control, tag)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Gathers anything that pickles, while something is constructed."""
        return self._base.all_gather_objects(value)

    def group_for(self, use: str, device: torch.device) -> dist.ProcessGroup:
        """Returns the process group of these ranks for one use, such as "exchange", on a device.

        The first call for a use is collective. On GPUs, what runs on another stream needs another use, or it
        would wait for the exchange of a later step.
        """
        key = use, job_backend(device)
        if key not in self._groups:
            if key[1] == "nccl":
                _warn_of_launch_order()
            with show_if_slow(f"connecting {self.num_ranks} ranks for the {use}"):
                named = int(self._base.all_gather(np.array([_groups_named])).max())
                self._groups[key] = _new_group(self.ranks, key[1], named)
                # NCCL would connect them in the first step.
                nothing = torch.zeros(self.num_ranks, dtype=torch.uint8, device=device)
                dist.all_to_all_single(torch.empty_like(nothing), nothing, group=self._groups[key])
        return self._groups[key]


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
    for group in _groups_of_job[1].values():
        next_rank = (group.rank + 1) % group.num_ranks
        with suppress(RuntimeError):  # it timed out
            group.control.recv([torch.empty(1)], next_rank, _NEVER_SENT).wait(timedelta(milliseconds=1))


def job_device() -> torch.device:
    """Returns the device on which the job's default group communicates: this rank's GPU if it has NCCL."""
    if job_backend(torch.device("cuda")) != "nccl" or not torch.cuda.is_available():
        return torch.device("cpu")
    job: Any = dist.group.WORLD
    return job.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def job_backend(device: torch.device) -> str:
    """Returns the backend of the job's default group on a device; if it has none, the usual one."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return backends.get(device.type) or dist.get_default_backend_for_device(device)


# The job, and the groups of more than one rank that this process has made in it.
_groups_of_job: list = [None, {}]


def _new_group(ranks: Sequence[int], backend: str, groups_named: int) -> dist.ProcessGroup:
    """Makes a process group with the timeout of the job. Collective over the ranks.

    Args:
        ranks: of the group.
        backend: of the group.
        groups_named: the most groups that `_agreed_names` has named on one of the ranks.
    """
    only_these = len(ranks) < dist.get_world_size()
    with _agreed_names(groups_named) if only_these else nullcontext():
        return dist.new_group(
            ranks, timeout=job_timeout(backend), backend=backend, use_local_synchronization=only_these
        )


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
    starts = nodes[::size]
    even = len(set(starts)) == len(starts) and all(
        node == starts[rank // size] for rank, node in enumerate(nodes)
    )
    return size if even and 1 < size < len(nodes) else None


_groups_named = 0  # by this process


@contextmanager
def _agreed_names(groups_named: int) -> Iterator[None]:
    """While active, some ranks can make groups without the other ranks of the job.

    Torch names a group of some ranks after a count of groups: those that the process is in, or from 2.14 on
    those it has made. Ranks with different counts would wait for each other under different names until they
    time out. A group that raises the count on its members alone would break a later group of all ranks in the
    same way. So these groups have names of their own, and leave torch's counts alone.
    """
    global _groups_named
    _groups_named = groups_named
    c10d: Any = dist.distributed_c10d
    name_by_torch = c10d._process_group_name

    def name(ranks: Sequence[int], use_hashed_name: bool) -> str:
        global _groups_named
        _groups_named += 1
        members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
        return f"balanced_{members}_{_groups_named}"

    c10d._process_group_name = name
    try:
        yield
    finally:
        c10d._process_group_name = name_by_torch
