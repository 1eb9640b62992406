"""The ranks to balance among, and the process groups that they plan and exchange over."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """Two process groups of the same ranks, so that neither's traffic queues behind TorchRec's.

    Attributes:
        rank: of this process within the group.
        num_ranks: ranks in the group.
        planning: gloo, for host tensors; None for a single rank.
        exchange: of the default group's backends; None for a single rank.
        ranks_per_node: if each node has so many consecutive ranks of the group; None if nodes do not matter,
            as on one machine, or have different numbers of ranks.
    """

    rank: int
    num_ranks: int
    planning: dist.ProcessGroup | None
    exchange: dist.ProcessGroup | None
    ranks_per_node: int | None

    @staticmethod
    def of(process_group: dist.ProcessGroup | None = None) -> RankGroup:
        """The ranks of `process_group`, or all of them. Collective over those ranks.

        Raises:
            ValueError: this rank is not in `process_group`.
        """
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group it was given; a rank balances among the "
                "ranks of a group that it belongs to"
            )
        if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
            return RankGroup.alone()
        ranks = dist.get_process_group_ranks(process_group)
        only_these = len(ranks) < dist.get_world_size()
        if only_these:
            _align_group_counts(process_group)
        planning = dist.new_group(ranks, backend="gloo", use_local_synchronization=only_these)
        nodes = [""] * len(ranks)
        dist.all_gather_object(nodes, socket.gethostname(), group=planning)
        return RankGroup(
            rank=dist.get_rank(planning),  # new_group sorts the ranks, whatever their order in process_group
            num_ranks=len(ranks),
            planning=planning,
            exchange=dist.new_group(ranks, use_local_synchronization=only_these),
            ranks_per_node=ranks_per_node(nodes),
        )

    @staticmethod
    def alone() -> RankGroup:
        """Only this rank: nothing to communicate."""
        return RankGroup(rank=0, num_ranks=1, planning=None, exchange=None, ranks_per_node=None)


def ranks_per_node(nodes: list[str]) -> int | None:
    """How many consecutive ranks every node has, given each rank's node; None if nodes do not matter."""
    size = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    starts = nodes[::size]
    even = len(set(starts)) == len(starts) and all(
        node == starts[rank // size] for rank, node in enumerate(nodes)
    )
    return size if even and 1 < size < len(nodes) else None


def _align_group_counts(process_group: dist.ProcessGroup | None) -> None:
    """Lets the ranks of `process_group` make further groups without the other ranks of the job.

    Torch then names a group after its ranks and the number of groups that the process is in. Ranks in
    different numbers of groups would wait for each other under different names until they time out, so those
    in fewer first join groups of their own.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts = [0] * dist.get_world_size(process_group)
    dist.all_gather_object(counts, count, group=process_group)
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
