"""Checks that ranks agree on plans and on what they exchanged; for debugging and tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..sequence_batch.base_batch import BaseBatch
from ..sequence_batch.cut_rules import PIECE, CutRules
from ..sequence_batch.jagged_indices import spread
from ..sequence_batch.packed_rows import PackedRows, gather_rows, row_elements
from ..sequence_batch.row_schema import FieldValue, RowSchema
from .channel import Channel
from .failures import portable, raise_first
from .shuffle_plan import ShufflePlan


def check_plans(channel: Channel, place: Callable[[], ShufflePlan]) -> ShufflePlan:
    """Returns the plan of `place`, once all ranks have the same. Collective; for the planning thread.

    Raises:
        RuntimeError: the plans differ.
        Exception: the error of `place` on the first rank that has one, on every rank.
    """
    plan: ShufflePlan | None = None
    failure: Exception | None = None
    try:
        plan = place()
    except Exception as error:  # raised again on all ranks below
        failure = error
    mine = -1 if plan is None else plan.fingerprint
    fingerprints = channel.all_gather(np.array([mine]))[:, 0]
    if (fingerprints < 0).any():
        raise_first(channel.all_gather_objects(portable(failure)), failure, channel.rank)
    if plan is None:
        raise RuntimeError("planning failed on a rank that gave no cause")
    _raise_if_different(fingerprints)
    return plan


def check_same_plan(channel: Channel, plan: ShufflePlan) -> None:
    """Compares the plans that ranks are about to carry out. Collective; for the main thread.

    Raises:
        RuntimeError: the plans differ; on every rank.
    """
    _raise_if_different(channel.all_gather(np.array([plan.fingerprint]))[:, 0])


def check_placed_samples(channel: Channel, plan: ShufflePlan, loaded: PackedRows, rows: PackedRows) -> None:
    """Compares each rank's samples after the exchange with the plan and with the loaded ones.

    Collective; for the main thread.

    Args:
        channel: of the ranks.
        plan: the placement.
        loaded: the rows that this rank brought.
        rows: this rank's real rows.

    Raises:
        RuntimeError: a rank has more or fewer samples, of other lengths, or with other contents; on every
            rank.
    """
    here, own = plan.computed_by(channel.rank), plan.loaded_by(channel.rank)
    elements = row_elements(rows.lengths.cpu(), rows.schema).numpy()
    wrong = 0
    brought = gather_rows([loaded], np.arange(len(own)), plan.num_elements[own].sum(0).tolist())
    changed = np.zeros(len(plan.workloads), dtype=np.int64)
    changed[own] = row_hashes(brought.unpack(), brought.num_rows)
    if len(elements) == len(here):
        wrong = len(here) - int((elements == plan.num_elements[here]).all(1).sum())
        changed[here] -= row_hashes(rows.unpack(), rows.num_rows)
    table = channel.all_gather(np.concatenate([[rows.num_rows, wrong], changed]))
    for rank in np.flatnonzero(table[:, 0] != plan.num_placed)[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 0]} samples after the exchange, "
            f"expected {plan.num_placed[rank]}"
        )
    for rank in np.flatnonzero(table[:, 1])[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 1]} samples after the exchange that "
            "are not as long as planned"
        )
    for number in np.flatnonzero(table[:, 2:].sum(0))[:1]:
        home, row = plan.where_loaded(number)
        raise RuntimeError(
            f"row {row} of rank {home} of the ranks to balance among has other contents after the exchange, "
            f"on rank {plan.destination[number]} of them"
        )


def check_cut(whole: BaseBatch, cut: BaseBatch, pieces: np.ndarray, row_of: np.ndarray) -> None:
    """Compares samples with their pieces put together again; on the host, not collective.

    Args:
        whole, cut: the batch as loaded, and the result of its `cut_by`.
        pieces, row_of: as `cut_by` takes them.

    Raises:
        RuntimeError: they differ.
    """
    padding = np.arange(whole.num_samples, whole.batch_size)
    row_of, pieces = np.append(row_of, padding), np.append(pieces, np.zeros(len(padding), dtype=PIECE))
    rules, fields = whole.cut_rules(), whole.per_sample_fields()
    if rules is None:
        raise ValueError(f"a {type(whole).__name__} has no cut_rules, so its samples cannot be cut")
    together = torch.zeros(whole.batch_size, dtype=torch.int64)
    for name, value in cut.per_sample_fields().items():
        rows, positions, hashes = _hashed_elements(name, value, len(row_of))
        key, piece = rows // len(row_of), rows % len(row_of)
        begin, own_begin, own_end = _spans(name, fields[name], row_of, pieces, rules)[:, rows]
        places = positions + begin
        is_own = (places >= own_begin) & (places < own_end)
        mixed = _mixed(hashes, places, key)[is_own]
        together.index_add_(0, torch.from_numpy(row_of)[piece[is_own]], mixed)
    for row in np.flatnonzero(together.numpy() != row_hashes(fields, whole.batch_size))[:1]:
        raise RuntimeError(f"the pieces of row {row} do not make up the sample that was cut")


def _spans(
    name: str, whole: FieldValue, row_of: np.ndarray, pieces: np.ndarray, rules: CutRules
) -> torch.Tensor:
    """Returns for each key and piece of a field where its elements begin in their sample, and where those
    begin and end that no earlier piece has, int64 `[3, keys * pieces]`."""
    keys = whole.keys() if isinstance(whole, KeyedJaggedTensor) else [""]
    spans = []
    for number, key in enumerate(keys):
        lengths = np.ones_like(row_of)
        if not isinstance(whole, torch.Tensor):
            lengths = whole.lengths().view(len(keys), -1).long().numpy()[number, row_of]
        rule = rules.rule(f"{name}.{key}")
        spans.append([rule.span(lengths, pieces)[0], *rule.own_span(lengths, pieces)])
    return torch.from_numpy(np.array(spans)).transpose(0, 1).flatten(1)


def row_hashes(fields: Mapping[str, FieldValue], num_rows: int) -> np.ndarray:
    """Returns a hash of each row, int64 `[rows]`: a sum over its elements, wrapping around."""
    total = torch.zeros(num_rows, dtype=torch.int64)
    for name, value in fields.items():
        rows, positions, hashes = _hashed_elements(name, value, num_rows)
        key, row = rows // max(num_rows, 1), rows % max(num_rows, 1)
        total.index_add_(0, row, _mixed(hashes, positions, key))
    return total.numpy()


def _hashed_elements(
    name: str, value: FieldValue, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each element key · rows + row, its position in the row, and its hash; int64 on the host."""
    if isinstance(value, torch.Tensor):
        rows, positions, parts = torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64), [value]
    else:
        lengths = value.lengths().cpu().long()
        rows = torch.arange(len(lengths)).repeat_interleave(lengths)
        positions = spread(torch.zeros_like(lengths), lengths, len(rows))
        parts = [part for part in (value.values(), value.weights_or_none()) if part is not None]
    seed = torch.tensor(zlib.crc32(name.encode()))
    hashes = seed.expand(len(rows))
    for part in parts:
        flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        of_bytes = torch.zeros(len(rows), 0, dtype=torch.uint8)
        if flat.numel():
            of_bytes = flat.view(len(rows), -1).view(torch.uint8)
        for byte in of_bytes.long().unbind(1):
            hashes = _mixed(hashes, byte, seed)
    return rows, positions, hashes


def _mixed(*numbers: torch.Tensor) -> torch.Tensor:
    """Returns a hash of int64 numbers, element by element."""
    mixed = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        mixed = (mixed ^ number) * -7046029254386353131
        mixed = mixed ^ (mixed >> 29)
    return mixed


def check_same_schema(channel: Channel, schema: RowSchema) -> None:
    """Compares the kinds of values that ranks are about to return. Collective; for the main thread.

    Raises:
        ValueError: they differ; on every rank.
    """
    fingerprints = channel.all_gather(np.array([schema.fingerprint]))[:, 0]
    if (fingerprints == fingerprints[0]).all():
        return
    schemas = channel.all_gather_objects(schema)
    rank = int(np.flatnonzero(fingerprints != fingerprints[0])[0])
    raise ValueError(
        f"unshuffle got other values on rank {rank} than on rank 0: {schemas[0].difference(schemas[rank])}; "
        "give it the same names, keys, dtypes and trailing shapes on every rank"
    )


def _raise_if_different(fingerprints: np.ndarray) -> None:
    for rank in np.flatnonzero(fingerprints != fingerprints[0])[:1]:
        raise RuntimeError(
            f"ranks have different plans for one step: its hash is {fingerprints[0]:#x} on rank 0 and "
            f"{fingerprints[rank]:#x} on rank {rank} of the ranks to balance among. Every rank must compute "
            "the same from the same numbers: check that all run the same code and versions"
        )
