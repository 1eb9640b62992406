"""The ranks that balance together, and the process groups that they plan and exchange over."""

from __future__ import annotations

import functools
import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.tried_versions import warn_of_untried


@dataclass(frozen=True)
class RankGroup:
    """Ranks that balance together, and process groups of their own, apart from TorchRec's traffic.

    Attributes:
        ranks: ascending ranks of the job in the group.
        rank: this process's place among them.
        planning: gloo, for host numbers; None for a single rank. In a pipeline only the planning thread uses
            it: a call of the shuffler's `plan` alongside would mix up their messages.
        exchange: of the default group's backends, for the main thread; None for a single rank.
        unshuffle: the same for `unshuffle`, which is called on another stream: the collectives of a group
            must be issued in one order.
        ranks_per_node: if each node has this many consecutive ranks of the group; None if nodes do not
            matter, as on one machine, or have different numbers of ranks.
        checks: gloo, for the main thread, where ranks verify that they agree.
    """

    ranks: tuple[int, ...]
    rank: int
    planning: dist.ProcessGroup | None = None
    exchange: dist.ProcessGroup | None = None
    unshuffle: dist.ProcessGroup | None = None
    ranks_per_node: int | None = None
    checks: dist.ProcessGroup | None = None

    @staticmethod
    def of(process_group: dist.ProcessGroup | None = None, verify: bool = False) -> RankGroup:
        """Makes the group of the ranks of `process_group`, or of all ranks. Collective over those ranks.

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
        ranks = sorted(dist.get_process_group_ranks(process_group))  # as new_group sorts them
        only_these = len(ranks) < dist.get_world_size()
        new_group = functools.partial(dist.new_group, ranks, use_local_synchronization=only_these)
        on_gpus = "nccl" in dist.get_backend_config(process_group)
        with _agreed_names(process_group) if only_these else nullcontext():
            planning = new_group(backend="gloo")
            exchange = new_group()
            unshuffle = new_group() if on_gpus else exchange
            checks = new_group(backend="gloo") if verify else None
        return RankGroup(
            ranks=tuple(ranks),
            rank=dist.get_rank(planning),
            planning=planning,
            exchange=exchange,
            unshuffle=unshuffle,
            ranks_per_node=ranks_per_node(all_gather_object(socket.gethostname(), planning)),
            checks=checks,
        )

    @staticmethod
    def alone() -> RankGroup:
        """Returns the group of this rank only: nothing to communicate."""
        return RankGroup(ranks=(dist.get_rank() if dist.is_initialized() else 0,), rank=0)

    @staticmethod
    def of_all_for_planning(verify: bool) -> RankGroup:
        """Makes a group of all ranks of the job that only plans. Collective over all ranks."""
        planning = dist.new_group(backend="gloo")
        ranks = tuple(range(dist.get_world_size()))
        return RankGroup(ranks, dist.get_rank(), planning, checks=planning if verify else None)

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """Gathers int64 `[n]`, the same n on every rank, to `[ranks, n]`; for the planning thread."""
        return row[None] if self.planning is None else all_gather_row(row, self.planning)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Gathers anything that pickles; for the planning thread, and for rare events."""
        return [value] if self.planning is None else all_gather_object(value, self.planning)


def all_gather_row(row: np.ndarray, group: dist.ProcessGroup | None) -> np.ndarray:
    """Gathers host numbers `[n]`, the same n and dtype on every rank of `group`, to `[ranks, n]`."""
    mine = torch.from_numpy(row)
    table = torch.empty(dist.get_world_size(group), len(row), dtype=mine.dtype)
    dist.all_gather_into_tensor(table.view(-1), mine, group=group)
    return table.numpy()


def all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gathers anything that pickles from the ranks of `group`."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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
def _agreed_names(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """While active, the ranks of `process_group` can make groups without the other ranks of the job.

    Torch names a group of some ranks after a count of groups: those that the process is in, or from 2.14 on
    those it has made. Ranks with different counts would wait for each other under different names until they
    time out. A group that raises the count on its members alone would break a later group of all ranks in the
    same way. So these groups have names of their own, and leave torch's counts alone.
    """
    global _groups_named
    _groups_named = max(all_gather_object(_groups_named, process_group))
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
