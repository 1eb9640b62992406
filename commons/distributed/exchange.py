"""Moves samples between ranks according to a plan, with the step that carries both to the model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec.streamable import Pipelineable

from ..sequence_batch.fields import FieldValue, Schema, type_name
from ..sequence_batch.packed_rows import PackedRows, Selection, gather_fields, to_chunks
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import take_apart
from .plan import Route, ShufflePlan
from .ranks import note_if_lost

# Most steps from the one being planned to the one in training. A pipeline plans up to six before the first.
MOST_ON_THEIR_WAY = 8


@dataclass(eq=False)
class Step(Pipelineable):
    """A batch of any type with its plan, which TorchRec's pipelines pass along like a plain batch.

    All other attributes and items are those of `batch`.

    Attributes:
        rows: this rank's rows, first prepared on the host, then copied to the device, and then exchanged.
        plan: plan of the ranks that exchange with this one.
        load_seconds: time that this rank waited for its loader, for the batch of a later step.
        wait_seconds: time that this rank waited for the plan.
        exchange_seconds: host time of the exchange.
        failures: errors in this step that all ranks have to raise with the next plan.
    """

    rows: Rows
    plan: ShufflePlan
    load_seconds: float = 0.0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    failures: list[Exception] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        """The batch as loaded. After the exchange, the batch for the model."""
        return self.rows.batch

    @property
    def scale_to_mean(self) -> float:
        """Factor for a rank's loss sum: ranks ÷ loss tokens of all ranks. 0 without loss tokens."""
        whole = self.plan.whole
        return whole.num_ranks / whole.num_loss_tokens if whole.num_loss_tokens else 0.0

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the step with its rows on `device`."""
        return replace(self, rows=self.rows.to(device, non_blocking))

    def pin_memory(self) -> Self:
        """Returns the step with its rows in pinned host memory."""
        return replace(self, rows=self.rows.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses the rows."""
        self.rows.record_stream(stream)

    def let_go(self) -> None:
        """Releases the memory of the batch, which has run."""
        self.rows = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name == "rows":  # not set yet, as in copy.copy
            raise AttributeError(name)
        batch = self.rows.batch  # raises the error that made the property `batch` fail
        return batch if name == "batch" else getattr(batch, name)

    def __getitem__(self, key: Any) -> Any:
        return self.batch[key]


def check_not_hidden(batch: Any) -> None:
    """Raises a TypeError if a step's attribute would hide tensors of the batch from TorchRec."""
    names = Step.__dataclass_fields__.keys() | {name for name in dir(Step) if not name.startswith("_")}
    for name in sorted(names):
        hidden = None
        with suppress(KeyError):  # raised by dicts whose __getattr__ looks up items
            hidden = getattr(batch, name, None)
        if take_apart(hidden).tensors_and_arrays():
            raise TypeError(
                f"a {type_name(batch)} has tensors in {name!r}, which TorchRec would not see, because its "
                "step has an attribute of the same name: rename the field"
            )


def view_of(batch: Any, shared_fields: Collection[str]) -> Rows:
    """Returns the rows of a loaded batch of any supported type, to count or to move them.

    Raises:
        TypeError: `batch` is a step, which a pipeline has planned before.
    """
    if isinstance(batch, Step):
        raise TypeError(
            "a batch is a step that was planned before: a _next_batch must not repeat one of the pipeline's "
            "batches for a rank that ran dry. Return None there: ranks may have fewer batches"
        )
    return Rows(batch, shared_fields)


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
