"""The ranks to balance among, and the process groups that they plan and exchange over."""

from __future__ import annotations

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
    """

    rank: int
    num_ranks: int
    planning: dist.ProcessGroup | None
    exchange: dist.ProcessGroup | None

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
        return RankGroup(
            rank=dist.get_rank(process_group),
            num_ranks=len(ranks),
            planning=dist.new_group(ranks, backend="gloo", use_local_synchronization=True),
            exchange=dist.new_group(ranks, use_local_synchronization=True),
        )

    @staticmethod
    def alone() -> RankGroup:
        """Only this rank: nothing to communicate."""
        return RankGroup(rank=0, num_ranks=1, planning=None, exchange=None)
