"""Moves ids from a checkpoint of another number of ranks to the ranks that own them now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .id_mix import MARK_OF_FREE_ROW, owners
from .id_rows import IdRows


def place_ids(rows: IdRows, states: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gives each id a row on the rank that owns it, and moves the row's states with it. Collective.

    If a rank owns more ids than it has rows, the ids that it would evict first are lost. Rows without an id
    keep their contents. Each rank temporarily needs about 100 bytes per row of the whole table, for the ids
    of all ranks. It also needs send and receive buffers for one state, each at most as large as its own part.

    Args:
        rows: this rank's rows of the table, as loaded.
        states: embeddings and optimizer states as loaded, `[rows of this rank, ...]` each; changed in place.
        group: process group of the ranks.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    starts = torch.tensor(rows.segments[1:-1], dtype=torch.int64, device=states[0].device)
    kept = _kept(_of_all_ranks(rows, group), rows.segments)
    held_by = [torch.bucketize(entries_kept[1], starts, right=True) for entries_kept in kept]
    outgoing = [
        entries_kept[1, holders == rank] - rows.segments[rank]
        for entries_kept, holders in zip(kept, held_by, strict=True)
    ]
    # Rows arrive in the order of their source ranks.
    places = torch.argsort(held_by[rank], stable=True)
    sizes = torch.bincount(held_by[rank], minlength=num_ranks).tolist()
    for state in states:
        received = state.new_empty(len(places), *state.shape[1:])
        sent = state[torch.cat(outgoing)]
        dist.all_to_all_single(received, sent, sizes, [len(to_owner) for to_owner in outgoing], group)
        state[places] = received
    rows.set_entries(kept[rank][0], kept[rank][2])


def _of_all_ranks(rows: IdRows, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers `IdRows.entries` of all ranks, int64 `[3, any]`, including free rows and padding."""
    entries = rows.entries()
    most = max(end - start for start, end in zip(rows.segments, rows.segments[1:], strict=False))
    padded = entries.new_full((len(entries), most), MARK_OF_FREE_ROW)
    padded[:, : entries.shape[1]] = entries
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group)
    return torch.cat(gathered, 1)


def _kept(entries: torch.Tensor, segments: Sequence[int]) -> list[torch.Tensor]:
    """Returns the entries that each rank keeps: its most used ids, as many as fit, in ascending order."""
    num_ranks = len(segments) - 1
    ids, _, used = entries
    owner = owners(ids, num_ranks)
    owner[ids == MARK_OF_FREE_ROW] = num_ranks
    by_use = torch.argsort(used, descending=True, stable=True)
    order = by_use[torch.argsort(owner[by_use], stable=True)]
    per_owner = order.split(torch.bincount(owner, minlength=num_ranks + 1).tolist())
    kept = []
    for entries_kept, start, end in zip(per_owner[:-1], segments, segments[1:], strict=False):
        chosen = entries[:, entries_kept[: end - start - 1]]  # ids without a row share the last row
        kept.append(chosen[:, torch.argsort(chosen[0])])
    return kept
