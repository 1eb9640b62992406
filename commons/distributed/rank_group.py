"""The ranks to balance among, and the process groups that they plan and exchange over."""

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

PLANNING_BACKENDS = ("device", "gloo")


@dataclass(frozen=True)
class RankGroup:
    """Process groups of the same ranks, so that nothing here queues behind TorchRec's traffic.

    Attributes:
        rank: of this process within the group.
        num_ranks: ranks in the group.
        planning: gloo, for host tensors; None for a single rank. In a pipeline only the thread that plans
            uses it: calling `plan` of its shuffler beside it would mix their messages up.
        exchange: of the default group's backends; None for a single rank. Only the main thread uses it.
        way_back: the same for `unshuffle`, which is called on another stream: one group keeps one order.
        ranks_per_node: if each node has so many consecutive ranks of the group; None if nodes do not matter,
            as on one machine, or have different numbers of ranks.
        device_planning: of the default group's backends, where the planning gather is to run on the device.
        checks: gloo, for the main thread, where ranks are to compare what they have.
    """

    rank: int
    num_ranks: int
    planning: dist.ProcessGroup | None
    exchange: dist.ProcessGroup | None
    ranks_per_node: int | None
    way_back: dist.ProcessGroup | None = None
    device_planning: dist.ProcessGroup | None = None
    checks: dist.ProcessGroup | None = None

    @staticmethod
    def of(
        process_group: dist.ProcessGroup | None = None, planning_backend: str = "gloo", verify: bool = False
    ) -> RankGroup:
        """The ranks of `process_group`, or all of them. Collective over those ranks.

        Raises:
            KeyError: an unknown planning backend.
            ValueError: this rank is not in `process_group`.
        """
        warn_of_untried()
        if planning_backend not in PLANNING_BACKENDS:
            raise KeyError(f"unknown planning backend {planning_backend!r}; there are {PLANNING_BACKENDS}")
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group it was given; a rank balances among the "
                "ranks of a group that it belongs to"
            )
        if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
            return RankGroup.alone()
        ranks = dist.get_process_group_ranks(process_group)
        only_these = len(ranks) < dist.get_world_size()
        new_group = functools.partial(dist.new_group, ranks, use_local_synchronization=only_these)
        on_gpus = "nccl" in dist.get_backend_config(process_group)
        with _agreed_names(process_group) if only_these else nullcontext():
            planning = new_group(backend="gloo")
            exchange = new_group()
            way_back = new_group() if on_gpus else exchange
            device_planning = new_group() if planning_backend == "device" else None
            checks = new_group(backend="gloo") if verify else None
        return RankGroup(
            rank=dist.get_rank(planning),  # new_group sorts the ranks, whatever their order in process_group
            num_ranks=len(ranks),
            planning=planning,
            exchange=exchange,
            way_back=way_back,
            ranks_per_node=ranks_per_node(all_gather_object(socket.gethostname(), planning)),
            device_planning=device_planning,
            checks=checks,
        )

    @staticmethod
    def alone() -> RankGroup:
        """Only this rank: nothing to communicate."""
        return RankGroup(rank=0, num_ranks=1, planning=None, exchange=None, ranks_per_node=None)

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """int64 `[n]` of each rank, the same n everywhere, to `[ranks, n]`; for the thread that plans."""
        if self.planning is None:
            return row[None]
        if self.device_planning is not None and "nccl" in dist.get_backend_config(self.device_planning):
            # A stream of its own: on the default stream the copy back would wait for the training before it.
            device = torch.device("cuda", torch.cuda.current_device())
            with torch.cuda.stream(_planning_stream(device)):
                table = torch.empty(self.num_ranks, len(row), dtype=torch.int64, device=device)
                dist.all_gather_into_tensor(
                    table.view(-1), torch.from_numpy(row).to(device), group=self.device_planning
                )
                return table.cpu().numpy()
        return all_gather_row(row, self.planning if self.device_planning is None else self.device_planning)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Anything that pickles, of each rank; for the thread that plans, and for rare events."""
        return [value] if self.planning is None else all_gather_object(value, self.planning)


def all_gather_row(row: np.ndarray, group: dist.ProcessGroup | None) -> np.ndarray:
    """Host numbers `[n]` of each rank of a group, the same n and type everywhere, to `[ranks, n]`."""
    mine = torch.from_numpy(row)
    table = torch.empty(dist.get_world_size(group), len(row), dtype=mine.dtype)
    dist.all_gather_into_tensor(table.view(-1), mine, group=group)
    return table.numpy()


def all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Anything that pickles, of each rank of a group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@functools.cache
def _planning_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def ranks_per_node(nodes: list[str]) -> int | None:
    """How many consecutive ranks every node has, given each rank's node; None if nodes do not matter."""
    size = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    starts = nodes[::size]
    even = len(set(starts)) == len(starts) and all(
        node == starts[rank // size] for rank, node in enumerate(nodes)
    )
    return size if even and 1 < size < len(nodes) else None


_groups_named = 0  # by this process


@contextmanager
def _agreed_names(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within, the ranks of `process_group` can make further groups without the other ranks of the job.

    Torch would name a group of some ranks after the number of groups that the process is in, or from 2.14 on
    has made. Ranks with different numbers would wait for each other under different names until they time
    out. And where such a group raises the number on its members alone, a later group of all ranks would do
    the same. So these groups have names of their own, which leave the numbers of torch as they are.
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
