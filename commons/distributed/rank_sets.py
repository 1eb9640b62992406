"""Agreement of all ranks of a job on the sets to connect, over its store; it names ranks that do not come."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# How long ranks wait for the others. A job's own timeout is many minutes, and names nobody.
PATIENCE_S = 60.0

Ranks = tuple[int, ...]
Uses = Collection[str]  # what process groups are for
# The ranks of a rank's set: None for all, and none if it was given a group without itself. What it uses the
# set for, and the process groups that it has counted.
_Post = tuple[Ranks | None, Uses, int]

_TOGETHER = (
    "making one for some of the ranks is collective over the job: all ranks make theirs at the same time. A "
    "rank that keeps its samples makes the same shuffler in a group of itself, as in own, _ = "
    "dist.new_subgroups_by_enumeration([[0, 1], [2]]), because an identity shuffler, or one with "
    "enabled=False, takes no part"
)
_OF_ALL = "making one for all ranks, or a pipeline, is collective over them"
_IF_LATE = "If they are only late, have all ranks wait for them before, as in dist.barrier()"


def agree_on_sets(number: int, ranks: Ranks, uses: Uses) -> list[tuple[Ranks, Uses]]:
    """Returns the sets of more than one rank, ascending, with what any of their ranks uses.

    Collective over the job. It takes a few messages to the store, and none between ranks.

    Args:
        number: how often this job has agreed before; the same on all ranks.
        ranks: ascending, those of this rank's set; none if it was given a group without itself.
        uses: what this rank uses the set for.

    Raises:
        ValueError: a rank was given a group without itself, or the ranks of a set name another; on all ranks.
        RuntimeError: ranks have not come `PATIENCE_S` after another; on that one and all that come.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    job_store = dist.distributed_c10d._get_default_store()
    store: Any = dist.PrefixStore(f"workload_balancer/sets_{number}", job_store)
    posts = [f"post_{of}" for of in range(num_ranks)]
    of_all = ranks == tuple(range(num_ranks))
    post: _Post = None if of_all else ranks, uses, dist.distributed_c10d._world.group_count
    store.set(posts[rank], pickle.dumps(post))
    if store.add("arrived", 1) == num_ranks:
        _end(store, _find_sets([pickle.loads(each) for each in store.multi_get(posts)]))
    try:
        store.wait(["end"], timedelta(seconds=PATIENCE_S))
    except RuntimeError:  # each kind of store has an error of its own
        late = [of for of in range(num_ranks) if not store.check([posts[of]])]
        if late:  # else the last one has come just now
            who = f"{ranks_text(late)} {'has' if len(late) == 1 else 'have'}"
            why = f"{_OF_ALL if of_all else _TOGETHER}. {_IF_LATE}"
            _end(store, RuntimeError(f"{who} not made a shuffler within {PATIENCE_S:g} s: {why}"))
    end = pickle.loads(store.get("end"))
    if isinstance(end, Exception):
        raise end
    return end


def _end(store: Any, end: list[tuple[Ranks, Uses]] | Exception) -> None:
    """Ends a meeting, unless another rank has: all ranks go on with the same."""
    if store.add("ended", 1) == 1:
        store.set("end", pickle.dumps(end))


def _find_sets(posts: Sequence[_Post]) -> list[tuple[Ranks, Uses]] | Exception:
    """Returns the sets, and what they are for, from the posts by rank; or what is wrong with them."""
    everyone = tuple(range(len(posts)))
    members: dict[Ranks, list[int]] = {}
    uses: dict[Ranks, set[str]] = {}
    for rank, (given, used, _) in enumerate(posts):
        ranks = everyone if given is None else given
        members.setdefault(ranks, []).append(rank)
        uses.setdefault(ranks, set()).update(used)
    if () in members:
        return ValueError(
            f"{ranks_text(members[()])} is not in the process_group it was given; a rank balances among the "
            "ranks of a group that it belongs to"
        )
    for ranks, present in members.items():
        for rank in sorted({*ranks} - {*present})[:1]:
            others = next(each for each, theirs in members.items() if rank in theirs)
            here, there = (
                ", or a pipeline, for all ranks" if each == everyone else f" for {ranks_text(each)}"
                for each in (ranks, others)
            )
            return ValueError(
                f"rank {present[0]} makes a shuffler{here}, and rank {rank} at the same time one{there}: "
                f"{_TOGETHER}"
            )
    counts = [count for _, _, count in posts]
    if len({*counts}) > 1:
        fewest, most = (counts.index(bound(counts)) for bound in (min, max))
        return ValueError(
            f"torch {torch.__version__} counts {counts[fewest]} process groups on rank {fewest} and "
            f"{counts[most]} on rank {most}. It names the next one after this number, so ranks would not "
            "find each other: have all ranks of the job make all groups, without "
            "use_local_synchronization=True"
        )
    return [(ranks, sorted(uses[ranks])) for ranks in sorted(members) if len(ranks) > 1]


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """Returns "rank 2", "ranks 2 and 3", or "ranks 2, 3 and 96 more"."""
    names = [str(rank) for rank in ranks]
    if len(names) > most:
        names[most - 1 :] = [f"{len(names) - most + 1} more"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
