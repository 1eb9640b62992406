"""Returns per-sample results to the rank and row from which each sample came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...distributed.exchange import RowsOf, direct_route, transfer
from ...distributed.extension import Extension
from ...distributed.plan import ShufflePlan
from ...jagged_indices import to_device_together
from ...sequence_batch.fields import FieldValue, Schema, hash_bytes, num_rows
from ...sequence_batch.packed_rows import (
    PackedRows,
    checked_lengths,
    jagged_parts,
    read_lengths,
    read_together,
    select_rows,
)
from ...sequence_batch.rows import Rows, hashes_of
from ..row_objects import check_results, lists_of

if TYPE_CHECKING:
    from ...distributed.shuffler import BatchShuffler

_COUNTS = "elements"
_LISTS = (
    "plain values stay where they are. Return numbers as a tensor, texts as a JaggedTensor of their bytes, "
    "and leave out lists that differ by rank"
)


class Unshuffle(Extension):
    """Returns per-sample results to the rank and row from which each sample came."""

    name = "unshuffle"
    order = 50

    def uses(self, device: torch.device) -> Sequence[str]:
        """Names a process group of its own for GPUs, where it and the exchange use different streams."""
        return () if device.type == "cpu" else ("unshuffle",)

    def setup(self, shuffler: BatchShuffler) -> None:
        """Makes a channel on which ranks agree on the kinds of their values."""
        self._group, self._exchanges = shuffler.group, shuffler.exchanges
        self._shared_fields = set(shuffler.shared_fields)
        self._channel = shuffler.group.channel()
        self._every_call = any(extension.verifies for extension in shuffler.extensions)
        self._agreed: dict[Schema, dict[str, int]] = {}  # hashes of lists, by schema of the tensors

    def unshuffle(self, values: Any, plan: ShufflePlan) -> Any:
        """Returns per-sample results to the rank and row from which each sample came. Collective.

        This takes one all-to-all. Jagged values take a second one and a host-device synchronization, for
        their lengths. The first call for each kind of values (names, keys, dtypes, and trailing shapes) also
        gathers host numbers, by which ranks agree on the kind. The order of names does not matter.

        Later calls compare kinds only if an extension verifies. Otherwise, if kinds differ between ranks, a
        rank with a new kind waits for the others, and known kinds are mistaken for each other.

        Args:
            values: tensor, KeyedJaggedTensor, or JaggedTensor, or a batch of these. It has one row for each
                row that the exchange gave this rank, or only for its `plan.num_placed[rank]` samples.
            plan: plan of the exchange.

        Returns:
            Values of the same kind in the order of the loaded batch, zero or empty in its padding rows. The
            jagged values of a sample's pieces are joined. A dense value is that of the last piece.

        Raises:
            TypeError: `values` has a list of tensors that may be samples.
            ValueError: ranks passed different kinds of values in the first call for one of the kinds; raised
                on every rank. Or a value has the path of a shared field, or no rows. Or a value has the wrong
                number of rows, or lengths that do not account for all jagged values; raised on this rank
                only, while the others wait for it.
        """
        view, rank = Rows(values), self._group.rank
        if named := sorted(self._shared_fields.intersection(part.path for part in view.tree.each())):
            raise ValueError(
                f"unshuffle got {named}, which the shuffler's shared_fields name: leave out what samples "
                "share, and give a result of samples another name"
            )
        own = plan.rows.loaded_by(rank)
        starts = plan.rows.starts_sample[own]
        num_samples = int(starts.sum())
        num_rows = int(plan.rows.batch_sizes[rank]) - (len(own) - num_samples)
        # If batches know their padding, a rank without a batch gave the exchange one padding row.
        num_rows = max(num_rows, int(plan.rows.format is None or plan.rows.format.pads))
        if starts.all():
            fields, _ = self._rows_at_home(view, plan, num_rows)
        else:
            fields = _join_pieces(*self._rows_at_home(view, plan, len(own)), starts, num_rows)
        return view.replaced(fields, num_rows, num_samples).batch

    def _rows_at_home(
        self, values: Rows, plan: ShufflePlan, num_rows: int
    ) -> tuple[dict[str, FieldValue], np.ndarray]:
        """Returns the values of the real rows that this rank loaded, in order and padded to `num_rows`, and
        the lengths of these rows, int64 `[real rows, keys]`."""
        group, rank = self._group, self._group.rank
        held, at_home = plan.computed_by(rank), plan.rows.loaded_by(rank)
        fields = dict(sorted(values.fields.items()))  # the same order on every rank
        rows = _check_rows(fields, int(plan.num_placed[rank]), int(plan.num_rows[rank]))
        values.tree.check_no_samples()
        values.tree.check_replaceable()
        schema = Schema.of(fields)
        if not self._exchanges:
            packed = PackedRows.pack(fields, schema, read_lengths(fields, schema, rows))
            return select_rows([packed], np.arange(len(held)), num_rows), packed.lengths[: len(held)]
        self._check_kind(schema, hashes_of(lists_of(values.tree) | values.tree.facts_in_attributes()))
        device = values.device
        use = "exchange" if device.type == "cpu" else "unshuffle"
        to, come_from = plan.rows.home[held], plan.destination[at_home]

        def move(sent: PackedRows, to_come: np.ndarray, num_rows: int) -> dict[str, FieldValue]:
            ends = RowsOf(to, sent.lengths), RowsOf(come_from, to_come)
            route = direct_route(sent.schema, *ends, rank, group.num_ranks, num_rows)
            return transfer(sent, route, partial(group.group_for, use))

        lengths, to_come = (np.zeros((count, 0), dtype=np.int64) for count in (rows, len(at_home)))
        if schema.jagged_fields:
            # Only the rank that computed a value knows its length. The host reads all lengths at once.
            parts = jagged_parts(fields, schema)
            counts = {_COUNTS: torch.cat(parts[::2]).long().view(schema.num_keys, rows).T.contiguous()}
            arrived = move(PackedRows.pack(counts, Schema.of(counts), lengths), to_come, len(at_home))
            *own, to_come = read_together([*parts, arrived[_COUNTS]])
            lengths = checked_lengths(fields, schema, rows, own)
        return move(PackedRows.pack(fields, schema, lengths), to_come, num_rows), to_come

    def _check_kind(self, schema: Schema, lists: dict[str, int]) -> None:
        """Raises a ValueError on every rank if ranks differ in the kind, or in lists of plain values beside
        the tensors, or on this rank only if a list has changed. Collective if the kind is new or ranks
        verify."""
        if schema in self._agreed and not self._every_call:
            if self._agreed[schema] != lists:
                raise ValueError(f"a list given to unshuffle has changed since the first call: {_LISTS}")
            return
        kind = np.array([hash_bytes(repr(of).encode()) for of in (schema.fields, sorted(lists.items()))])
        kinds = self._channel.all_gather(kind)
        for rank in np.flatnonzero((kinds != kinds[0]).any(1))[:1]:
            schemas, ranks = self._channel.all_gather_objects(schema), self._channel.ranks
            difference = schemas[0].difference(schemas[rank]) or f"they differ in a list: {_LISTS}"
            raise ValueError(
                f"unshuffle got other values on rank {ranks[rank]} than on rank {ranks[0]}: {difference}; "
                "give it the same names, keys, dtypes and trailing shapes on every rank"
            )
        self._agreed[schema] = lists


def _join_pieces(
    fields: dict[str, FieldValue], lengths: np.ndarray, starts: np.ndarray, num_rows: int
) -> dict[str, FieldValue]:
    """Joins the rows of each sample's pieces: concatenates jagged values, and keeps the last dense one.

    `starts`, bool `[rows]`, tells which rows are the first of their samples. The result has `num_rows` rows.
    """
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    packed = PackedRows.pack(fields, Schema.of(fields), lengths)
    (last_row,) = to_device_together([last], packed.sections[0].device)
    sections = [
        words.index_select(0, last_row) if section.is_dense else words
        for section, words in zip(packed.schema.sections, packed.sections, strict=True)
    ]
    joined = replace(packed, lengths=np.add.reduceat(lengths, first, axis=0), sections=sections)
    return select_rows([joined], np.arange(len(first)), num_rows)


def _check_rows(fields: Mapping[str, FieldValue], num_real: int, num_padded: int) -> int:
    """Returns the number of rows of all fields. Raises a ValueError if the exchange gave a different one."""
    check_results(fields, "unshuffle")
    sizes = {name: num_rows(name, value) for name, value in fields.items()}
    first = next(iter(sizes.values()))
    for name, rows in sizes.items():
        if rows not in (num_real, num_padded) or rows != first:
            raise ValueError(
                f"unshuffle got {rows} rows in {name or 'values'!r}, expected {num_padded}, as the exchange "
                f"gave this rank, or {num_real} without the padding; join values of micro-batches first"
            )
    return first
