"""Groups of some ranks, made by these alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.rank_group import RankGroup


def _sum_over(group: dist.ProcessGroup | None) -> int:
    rank = torch.tensor(dist.get_rank())
    dist.all_reduce(rank, group=group)
    return int(rank)


def _balance_among_some() -> list[int]:
    """Ranks are in different numbers of groups, and make different numbers of them to balance among."""
    low, outer = dist.new_group([0, 1]), dist.new_group([0, 3])
    sums = []
    parents = {0: [outer, low, outer], 1: [low], 3: [outer, outer]}.get(dist.get_rank(), [])
    for parent in parents:
        made = RankGroup.of(parent)
        rank = np.array([dist.get_rank()])
        sums += [
            _sum_over(made.exchange_group(torch.device("cpu"))),
            int(made.channel().all_gather(rank).sum()),
        ]
    everyone = dist.new_group()
    return [*sums, _sum_over(everyone)]


def test_groups_of_some_ranks_do_not_keep_later_ones_of_all_from_forming(pools):
    first, second, third, fourth = pools(4).run(_balance_among_some)
    assert first == [3, 3, 1, 1, 3, 3, 6]
    assert second == [1, 1, 6]
    assert third == [6]
    assert fourth == [3, 3, 3, 3, 6]
