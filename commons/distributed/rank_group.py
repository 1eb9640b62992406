"""The ranks that balance together, with the process groups and channels that they communicate over.

All shufflers, pipelines, logs and checkpoints of a process share one gloo group and one exchange group per
set of ranks. A gloo group of N ranks holds N + 3 descriptors and 3 threads, and an NCCL communicator holds
device memory. Each user of the gloo group has its own `Channel`.

The main thread launches every exchange and unshuffle, and TorchRec's forward collectives. Autograd's thread
launches the backward collectives, while the main thread waits. So all ranks launch in the same order. With
NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or later), the device follows this order, too.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pickle
import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..tried_versions import warn_of_untried
from ..warn_once import warn_once
from .channel import Channel, Ranks, note_if_lost

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
        warn_of_untried()
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
