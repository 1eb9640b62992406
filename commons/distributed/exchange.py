"""Moves samples between ranks according to a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..sequence_batch.packed_rows import PackedRows, Selection, gather_fields, to_chunks
from ..sequence_batch.row_schema import FieldValue, Schema
from .channel import note_if_lost
from .shuffle_plan import Route, ShufflePlan


class RowsOf(NamedTuple):
    """Rows of one rank before or after a transfer, in ascending order of their numbers."""

    ranks: np.ndarray  # int64 `[rows]`, destination of each row before a transfer, or source after it
    lengths: np.ndarray  # int64 `[rows, keys]`; padding may follow the rows


def direct_route(
    schema: Schema, held: RowsOf, wanted: RowsOf, rank: int, num_ranks: int, num_rows: int
) -> Route:
    """Returns the route on which each row goes straight to its destination.

    Rows are in ascending order on both sides, so sender and receiver agree on the order within a chunk.
    `num_rows` is the final number of rows, padding included.
    """
    leaving, to, starts = _by_rank(held.ranks, rank)
    chunks = np.split(leaving, starts[1:])
    selection = Selection.of(schema, [held.lengths], chunks)
    sent, received = np.zeros((2, num_ranks), dtype=np.int64)
    sent[to] = selection.chunk_bytes[: len(to)]
    coming, sources, starts = _by_rank(wanted.ranks, rank)
    lengths = np.split(wanted.lengths[coming], starts[1:])[: len(sources)]
    received[sources] = [schema.chunk_bytes(schema.sizes(of_chunk).sum(1)) for of_chunk in lengths]
    stays = wanted.ranks == rank
    keeps = bool(stays.any()) or not sources.size
    positions = np.empty(len(wanted.ranks), dtype=np.int64)
    positions[stays] = np.flatnonzero(held.ranks == rank)
    positions[coming] = (len(held.lengths) if keeps else 0) + np.arange(len(coming))
    sources_of = [held.lengths, *lengths] if keeps else lengths
    placed = Selection.of(schema, sources_of, [positions], num_rows - len(positions))
    arriving = list(zip(sources.tolist(), lengths, strict=True))
    return Route(selection, sent.tolist(), received.tolist(), arriving, keeps, placed)


def transfer(
    rows: PackedRows, route: Route, group: Callable[[torch.device], dist.ProcessGroup | None]
) -> dict[str, FieldValue]:
    """Sends the rows that this rank holds along a route, and returns the fields that it ends up with.

    Takes one collective on bytes for any number of fields, dtypes, and ranks, or none if no row moves. The
    host does not wait for the device. `group` returns the process group to use on a device.
    """
    sources = [rows] if route.keeps else []
    if route.leaving is not None:
        device = rows.sections[0].device
        send = torch.empty(0, dtype=torch.uint8, device=device)
        if len(route.leaving.lengths):
            send = to_chunks(rows, route.leaving)
        received = send.new_empty(sum(route.received_bytes))
        with note_if_lost():
            if route.gathers:
                send = F.pad(send, (0, route.sent_bytes[0] - len(send)))
                dist.all_gather_into_tensor(received, send, group=group(device))
            else:
                sizes = route.received_bytes, route.sent_bytes
                dist.all_to_all_single(received, send, *sizes, group=group(device))
        chunks = received.split(route.received_bytes)
        sources += [
            PackedRows.from_bytes(chunks[rank], rows.schema, lengths) for rank, lengths in route.arriving
        ]
    return gather_fields(sources, route.placed)


def route_of(plan: ShufflePlan, rank: int, schema: Schema, exchange: str) -> Route:
    """Returns a rank's route for the rows of a plan. `exchange` is one of `EXCHANGE_NAMES`."""
    rows = plan.rows
    lengths, num_rows = rows.lengths_as_loaded(rank), int(plan.num_rows[rank])
    if not plan.moves:  # the real rows stay, and the padding rows are replaced
        num_real = int(rows.num_loaded[rank])
        selection = Selection.of(schema, [lengths], [np.arange(num_real)], num_rows - num_real)
        return Route(None, [], [], [], True, selection)
    if exchange == "all_gather":
        return _gathering_route(plan, rank, schema, lengths)
    wanted, held = plan.computed_by(rank), RowsOf(plan.destination[rows.loaded_by(rank)], lengths)
    placed = RowsOf(rows.home[wanted], rows.key_lengths[wanted])
    return direct_route(schema, held, placed, rank, plan.num_ranks, num_rows)


def _gathering_route(plan: ShufflePlan, rank: int, schema: Schema, lengths: np.ndarray) -> Route:
    """Returns the route on which all ranks get all samples. Each pads its bytes to the largest size."""
    rows, samples = plan.rows, plan.computed_by(rank)
    leaving = Selection.of(schema, [lengths], [np.arange(rows.num_loaded[rank])])
    by_rank = np.split(rows.key_lengths, rows.home_start[1:])
    size = max(int(schema.chunk_bytes(schema.sizes(of_rank).sum(1))) for of_rank in by_rank)
    num_padding = int(plan.num_rows[rank]) - len(samples)
    placed = Selection.of(schema, by_rank, [samples], num_padding)
    sizes = [size] * plan.num_ranks
    return Route(leaving, sizes, sizes, list(enumerate(by_rank)), False, placed, gathers=True)


def _by_rank(ranks: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rows that other ranks receive or send, sorted by rank; these ranks; and the position of
    each rank's first row."""
    others = np.flatnonzero(ranks != rank)
    others = others[np.argsort(ranks[others], kind="stable")]
    return others, *np.unique(ranks[others], return_index=True)
