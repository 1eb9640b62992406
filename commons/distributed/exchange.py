"""Moves samples between ranks according to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..sequence_batch.packed_rows import PackedRows, gather_rows
from ..sequence_batch.row_schema import aligned
from .rank_group import RankGroup
from .shuffle_plan import ShufflePlan


@dataclass(frozen=True)
class RouteEnd:
    """The rows of one rank before a transfer, or after it, in ascending order of their numbers.

    Attributes:
        ranks: int64 `[rows]`, the rank that each goes to, or comes from.
        elements: int64 `[rows, jagged fields]`, elements of each in each jagged field.
        chunk_bytes: int64 `[ranks]`, aligned bytes to, or from, each other rank.
    """

    ranks: np.ndarray
    elements: np.ndarray
    chunk_bytes: np.ndarray

    @staticmethod
    def of(
        ranks: np.ndarray, elements: np.ndarray, row_bytes: np.ndarray, rank: int, num_ranks: int
    ) -> RouteEnd:
        """Makes the end at `rank`, one of `num_ranks`; `row_bytes` is int64 `[rows]`."""
        num_bytes = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(num_bytes, ranks, row_bytes)
        num_bytes[rank] = 0
        return RouteEnd(ranks, elements, aligned(num_bytes))


@dataclass(frozen=True)
class Route:
    """The rows that one rank holds before a transfer, and those it will hold after it.

    Both are in ascending order, so that two ranks agree on the order of the rows between them.
    """

    held: RouteEnd
    wanted: RouteEnd


class Traffic(NamedTuple):
    """Bytes between one rank and the others."""

    sent: int
    received: int


@dataclass(frozen=True)
class Exchange:
    """A way to move samples.

    Attributes:
        move: turns the rows that this rank loaded, real rows first, into its samples in the plan's order,
            without padding. One collective, whose sizes all come from the plan.
        traffic: the bytes that `move` sends and receives on a rank.
    """

    move: Callable[[PackedRows, ShufflePlan, RankGroup], PackedRows]
    traffic: Callable[[ShufflePlan, int], Traffic]


def route_of(plan: ShufflePlan, rank: int) -> Route:
    """Returns the rows that a plan moves from and to a rank."""
    rows = plan.rows

    def end(numbers: np.ndarray, rank_of: np.ndarray) -> RouteEnd:
        elements, num_bytes = rows.num_elements[numbers], rows.sample_bytes[numbers]
        return RouteEnd.of(rank_of[numbers], elements, num_bytes, rank, plan.num_ranks)

    return Route(end(rows.loaded_by(rank), plan.destination), end(plan.computed_by(rank), rows.home))


def transfer(rows: PackedRows, route: Route, rank: int, group: dist.ProcessGroup | None) -> PackedRows:
    """Sends each row straight to its rank, and copies those that stay.

    One all-to-all of bytes, whatever the number of fields, dtypes and ranks; no host-device synchronization.

    Args:
        rows: the rows that this rank holds; padding may follow the rows of the route.
        route: which rows leave, and which arrive.
        rank: this process's place in `group`, which carries the bytes.
    """
    held, wanted = route.held, route.wanted
    leaving, arriving = _by_rank(held, rank), _by_rank(wanted, rank)
    send = rows.lengths.new_empty(0, dtype=torch.uint8)
    if len(leaving):
        starts = _starts(held.ranks[leaving])
        send = rows.to_chunks(np.split(leaving, starts[1:]), np.add.reduceat(held.elements[leaving], starts))
    received = send.new_empty(int(wanted.chunk_bytes.sum()))
    received_bytes, sent_bytes = wanted.chunk_bytes.tolist(), held.chunk_bytes.tolist()
    dist.all_to_all_single(received, send, received_bytes, sent_bytes, group=group)
    sources = [rows]
    if len(arriving):
        starts = _starts(wanted.ranks[arriving])
        elements = np.add.reduceat(wanted.elements[arriving], starts)
        counts = np.diff(np.append(starts, len(arriving)))
        chunks = received.split(wanted.chunk_bytes[wanted.ranks[arriving][starts]].tolist())
        sources += [
            PackedRows.from_bytes(chunk, rows.schema, int(count), chunk_elements.tolist())
            for chunk, count, chunk_elements in zip(chunks, counts, elements, strict=True)
        ]
    positions = np.empty(len(wanted.ranks), dtype=np.int64)
    positions[wanted.ranks == rank] = np.flatnonzero(held.ranks == rank)
    positions[arriving] = rows.num_rows + np.arange(len(arriving))
    return gather_rows(sources, positions, wanted.elements.sum(0).tolist())


def _all_to_all(rows: PackedRows, plan: ShufflePlan, group: RankGroup) -> PackedRows:
    carrier = group.group_for("exchange", rows.lengths.device)
    return transfer(rows, route_of(plan, group.rank), group.rank, carrier)


def _all_to_all_traffic(plan: ShufflePlan, rank: int) -> Traffic:
    route = route_of(plan, rank)
    return Traffic(int(route.held.chunk_bytes.sum()), int(route.wanted.chunk_bytes.sum()))


def _all_gather(rows: PackedRows, plan: ShufflePlan, group: RankGroup) -> PackedRows:
    """Sends every sample to every rank; each rank sends as many bytes as the one with most."""
    by_rank = np.split(plan.rows.num_elements, plan.rows.home_start[1:])
    elements = np.stack([rank_elements.sum(0) for rank_elements in by_rank])
    size = _all_gather_size(plan)
    mine = np.arange(plan.rows.num_loaded[group.rank])
    packed = rows.to_chunks([mine], elements[group.rank : group.rank + 1])
    received = packed.new_empty(group.num_ranks, size)
    send = F.pad(packed, (0, size - len(packed)))
    dist.all_gather_into_tensor(received.view(-1), send, group=group.group_for("exchange", send.device))
    sources = [
        PackedRows.from_bytes(buffer, rows.schema, int(loaded), rank_elements.tolist())
        for buffer, loaded, rank_elements in zip(received, plan.rows.num_loaded, elements, strict=True)
    ]
    samples = plan.partition[group.rank]
    return gather_rows(sources, samples, plan.rows.num_elements[samples].sum(0).tolist())


def _all_gather_traffic(plan: ShufflePlan, rank: int) -> Traffic:
    bytes_of_others = _all_gather_size(plan) * (plan.num_ranks - 1)
    return Traffic(bytes_of_others, bytes_of_others)


def _all_gather_size(plan: ShufflePlan) -> int:
    num_bytes = np.zeros(plan.num_ranks, dtype=np.int64)
    np.add.at(num_bytes, plan.rows.home, plan.rows.sample_bytes)
    return int(aligned(num_bytes).max())


def _by_rank(end: RouteEnd, rank: int) -> np.ndarray:
    """int64: the samples that go to, or come from, other ranks, sorted by rank."""
    others = np.flatnonzero(end.ranks != rank)
    return others[np.argsort(end.ranks[others], kind="stable")]


def _starts(sorted_ranks: np.ndarray) -> np.ndarray:
    """The indices at which runs of equal numbers start."""
    return np.flatnonzero(np.append(True, sorted_ranks[1:] != sorted_ranks[:-1]))


# By the names of `shuffler_settings.EXCHANGE_NAMES`.
EXCHANGES = {
    "all_gather": Exchange(_all_gather, _all_gather_traffic),
    "all_to_all": Exchange(_all_to_all, _all_to_all_traffic),
}
