"""Fetches the keys and values that pieces of a sample need from the ranks that hold its other pieces.

In a step that cuts a sample, each layer takes one all-to-all in forward and one in backward, on every rank of
the group, with or without a piece. These collectives have a communicator of their own and are launched on the
compute stream, so they never wait for the exchange of a later batch. Their sizes come from the plan, so host
and device do not synchronize.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...distributed.plan import ShufflePlan
from ...distributed.ranks import RankGroup
from ...jagged_indices import to_device_together
from ...named_ranges import named_range
from .cut_rules import PIECE
from .cutting import COLUMN


class PlacedPieces:
    """The places of a batch's rows in their samples, which the exchange adds in steps that cut a sample.

    A model that can train on pieces reads it as `batch.pieces`.

    Provisional: may change in a minor version.

    Attributes:
        rows: places of this rank's rows, `[rows]` of dtype `PIECE`; zeros in padding.
        bytes_fetched: bytes that this rank has received for its pieces, gradients included.
        seconds: time that the host has waited for these bytes.
        num_started, num_landed: numbers of fetches that the model has started and landed.
    """

    def __init__(self, plan: ShufflePlan, group: RankGroup) -> None:
        self._plan, self._group = plan, group
        self._all = plan.rows.columns[COLUMN]
        own = plan.computed_by(group.rank)
        self.rows = np.zeros(int(plan.num_rows[group.rank]), dtype=PIECE)
        self.rows[: len(own)] = self._all[own]
        self.bytes_fetched, self.seconds = 0, 0.0
        self.num_started = self.num_landed = 0

    @property
    def ends_sample(self) -> np.ndarray:
        """Whether each row is a whole sample or a last piece, bool `[rows]`; True in padding."""
        return self.rows["last_item"] == self.rows["num_items"]

    def all_rows(self) -> np.ndarray:
        """Returns all ranks' places, `[rows of the step]` of dtype `PIECE`, each sample's pieces in order."""
        return self._all

    def last_piece_count(self, count: str) -> np.ndarray:
        """Returns one of the `row_counts` of the last piece of each row's sample, int64 `[rows of the step]`,
        or zeros if batches do not have this count."""
        rows = self._plan.rows
        counts = rows.columns.get(count, np.zeros(len(self._all), dtype=np.int64))
        return counts[np.append(rows.starts_sample[1:], True)][rows.sample_of]

    def check_read(self) -> None:
        """Raises a RuntimeError if the model, after running on the batch, has fetched no keys and values for
        its pieces, or did not land every fetch that it started."""
        if self.num_started != self.num_landed:
            raise RuntimeError(
                f"a model started {self.num_started} fetches for its pieces and landed {self.num_landed}; "
                "every rank has to land each one, with or without a piece"
            )
        if not self.num_landed:
            raise RuntimeError(
                "samples of this batch are cut, and the model did not read batch.pieces: it took each piece "
                "for a whole sample. Fetch keys and values, or leave Pieces out (balance_split = False)"
            )

    def fetch(self, num_seen: np.ndarray, device: torch.device) -> KeyFetch:
        """Makes the fetch of this batch, which all layers share. Call it on every rank of the group.

        `num_seen`, int64 `[rows of the step]`, is the number of tokens that the queries of each row see,
        counted from the start of the row's sample. `device` is that of keys and values.
        """
        return KeyFetch(self, num_seen, device)


_NOTHING = np.zeros(0, dtype=np.int64)


def _cut_samples(plan: ShufflePlan) -> list[np.ndarray]:
    """Returns the ascending row numbers of the pieces of each cut sample."""
    starts = np.flatnonzero(plan.rows.starts_sample)
    ends = np.append(starts[1:], len(plan.rows.workloads))
    is_cut = ends - starts > 1
    return [np.arange(start, end) for start, end in zip(starts[is_cut], ends[is_cut], strict=True)]


def _needed(
    pieces: np.ndarray, first: np.ndarray, last: np.ndarray, num_seen: int
) -> Iterator[tuple[int, int]]:
    """Yields each piece that holds some of a sample's first `num_seen` tokens, and how many of them."""
    for piece in pieces.tolist():
        count = min(int(last[piece]), int(num_seen)) - int(first[piece])
        if count > 0:
            yield piece, count


class KeyFetch:
    """Fetches keys and values layer by layer. `PlacedPieces.fetch` makes it.

    Attributes:
        piece_rows: rows of this rank's batch that see tokens of other pieces, ascending.
        piece_starts: index in the batch of the first token of each of these rows.
        piece_keys: number of its sample's tokens that each of these rows sees.
        key_tokens: indices of the tokens that these rows see, row after row, int64. The tokens of the batch
            come first in the numbering, and the fetched tokens follow.
        sent_tokens: indices in the batch of the tokens to send, one int64 tensor on the device per rank.
        ranks: group whose ranks fetch from each other.
    """

    def __init__(self, pieces: PlacedPieces, num_seen: np.ndarray, device: torch.device) -> None:
        self.pieces, self.ranks = pieces, pieces._group
        self.group = self.ranks.group_for("fetch", device)
        (self.all_sent,) = to_device_together([self._work_out(pieces._plan, num_seen)], device)
        self.sent_tokens = self.all_sent.split(self.sent_counts)

    def _work_out(self, plan: ShufflePlan, num_seen: np.ndarray) -> np.ndarray:
        """Works out where keys for this rank's pieces will be, and how many tokens ranks send. Returns the
        indices of the tokens to send, rank after rank."""
        rank, num_ranks = self.ranks.rank, self.ranks.num_ranks
        own = plan.computed_by(rank)
        pieces_of_all = plan.rows.columns[COLUMN]
        first, last = pieces_of_all["first_token"], pieces_of_all["last_token"]
        own_starts = np.cumsum(last[own] - first[own]) - (last[own] - first[own])
        place_of = dict(zip(own.tolist(), own_starts.tolist(), strict=True))
        mine = [pieces for pieces in _cut_samples(plan) if (plan.destination[pieces] == rank).any()]
        place = int((last[own] - first[own]).sum())
        sent = [_NOTHING]
        self.sent_counts, self.received_counts = [0] * num_ranks, [0] * num_ranks
        for other in range(num_ranks):
            for pieces in mine if other != rank else []:
                there, here = (pieces[plan.destination[pieces] == on] for on in (other, rank))
                for piece, count in _needed(there, first, last, num_seen[here].max(initial=0)):
                    place_of[piece] = place
                    place += count
                    self.received_counts[other] += count
                for piece, count in _needed(here, first, last, num_seen[there].max(initial=0)):
                    sent.append(place_of[piece] + np.arange(count))
                    self.sent_counts[other] += count
        # The first piece of a sample usually sees only itself, as a whole sample does.
        sees_others = (first[own] > 0) | (num_seen[own] > last[own])
        piece_rows = np.flatnonzero(sees_others & np.isin(own, np.concatenate([_NOTHING, *mine])))
        pieces_of = {int(piece): pieces for pieces in mine for piece in pieces}
        keys = [
            place_of[piece] + np.arange(count)
            for seeing in own[piece_rows].tolist()
            for piece, count in _needed(pieces_of[seeing], first, last, num_seen[seeing])
        ]
        self.piece_rows, self.piece_starts = piece_rows, own_starts[piece_rows].tolist()
        self.piece_keys = num_seen[own[piece_rows]].tolist()
        self.key_tokens = np.concatenate([_NOTHING, *keys])
        return np.concatenate(sent)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, back: bool) -> dist.Work:
        """Starts to send keys and values, or with `back` their gradients. Returns the work to wait for."""
        out, into = self.sent_counts, self.received_counts
        if back:
            out, into = into, out
        return dist.all_to_all_single(received, sent, into, out, group=self.group, async_op=True)

    def start(self, keys: torch.Tensor, values: torch.Tensor) -> InFlight:
        """Starts the fetch of one layer. Call it on every rank of the group. `keys` and `values` of the batch
        are `[tokens, num_heads, head_dim]` each."""
        self.pieces.num_started += 1
        flight = InFlight(self)
        flight.received = _Launch.apply(keys, values, flight)
        return flight


class InFlight:
    """The keys and values of one layer during the fetch."""

    def __init__(self, fetch: KeyFetch) -> None:
        self.fetch = fetch
        self.received: Any = None
        self._work: Any = None
        self._sending: torch.Tensor | None = None
        self.returned: torch.Tensor | None = None

    def land(self) -> torch.Tensor:
        """Returns the fetched keys and values, `[fetched tokens, 2, num_heads, head_dim]`.

        Every rank must use the result in its loss, even an empty one, since its gradient takes a collective.
        """
        self.fetch.pieces.num_landed += 1
        landed = _Land.apply(self.received, self)
        self.received = None
        return landed

    def launch(self, sent: torch.Tensor, received: torch.Tensor, back: bool = False) -> None:
        """Starts the all-to-all, or with `back` the reverse one for gradients."""
        self._sending = sent  # kept alive until it has arrived
        fetch = self.fetch
        self._work = fetch.all_to_all(received, sent, back)
        fetch.pieces.bytes_fetched += received.numel() * received.element_size()

    def wait(self) -> None:
        """Waits for the all-to-all: on CUDA the stream waits, elsewhere the host."""
        start = time.perf_counter()
        try:
            with named_range("## wait for keys and values ##"):
                self._work.wait()
        except RuntimeError as error:
            peers = np.flatnonzero(np.add(self.fetch.sent_counts, self.fetch.received_counts)).tolist()
            raise RuntimeError(
                "this rank could not exchange keys and values of pieces, or their gradients, with ranks "
                f"{peers} of the ranks to balance among; one has failed, or is slow: {error}"
            ) from None
        waited = time.perf_counter() - start
        self.fetch.pieces.seconds += waited
        self.fetch.ranks.wait_seconds += waited
        self._work = self._sending = None


class _Launch(torch.autograd.Function):
    """Starts the fetch in forward, and ends the return of the gradients in backward.

    Work between `_Launch` and `_Land` in forward, and between their backwards, overlaps with the collectives.
    """

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor, flight: InFlight) -> torch.Tensor:
        ctx.flight, ctx.shape = flight, keys.shape
        fetch = flight.fetch
        sent = torch.stack([x.index_select(0, fetch.all_sent) for x in (keys, values)], 1)
        received = sent.new_empty((sum(fetch.received_counts), *sent.shape[1:]))
        flight.launch(sent, received)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flight = ctx.flight
        flight.wait()
        returned, flight.returned = flight.returned, None
        grads = returned.new_zeros((2, *ctx.shape))
        # Add rank by rank: a token may go to several ranks, and sums must not depend on thread order.
        parts = returned.split(flight.fetch.sent_counts)
        for tokens, part in zip(flight.fetch.sent_tokens, parts, strict=True):
            if len(tokens):
                grads[:, tokens] += part.transpose(0, 1)
        return grads[0], grads[1], None


class _Land(torch.autograd.Function):
    """Ends the fetch in forward, and starts the return of the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, flight: InFlight) -> torch.Tensor:
        ctx.flight = flight
        flight.wait()
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flight = ctx.flight
        flight.returned = grad.new_empty((len(flight.fetch.all_sent), *grad.shape[1:]))
        flight.launch(grad.contiguous(), flight.returned, back=True)
        return grad, None  # only links the two functions; `returned` holds the gradients
