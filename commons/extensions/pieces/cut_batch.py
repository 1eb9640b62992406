"""Cuts the samples of a host batch into the planned pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ...jagged_indices import spread
from ...sequence_batch.fields import Field, FieldValue, lengths_of
from ...sequence_batch.rows import Rows
from .cut_rules import PIECE, CutRules, FieldRule, own_spans, spans


def cut_rows(whole: Rows, pieces: np.ndarray, rules: CutRules) -> Rows:
    """Returns the rows of a host batch after the cut: one row per piece, then the padding rows.
    `pieces`, of dtype `PIECE`, covers all real rows in order."""
    num_samples = len(pieces)
    pieces, row_of = _with_padding(whole, pieces)
    cut: dict[str, FieldValue] = {}
    for name, value in whole.fields.items():
        begins, ends = spans(*_whole_fields(name, value, pieces, row_of, rules))
        if isinstance(value, torch.Tensor):
            selected = value.index_select(0, torch.from_numpy(row_of))
            selected[torch.from_numpy(ends[:, 0] == 0)] = 0
            cut[name] = selected
            continue
        starts = value.offsets()[:-1].view(begins.shape[1], whole.num_rows).long()[:, row_of]
        counts = torch.from_numpy((ends - begins).T.ravel())
        first = (starts + torch.from_numpy(begins.T)).flatten()
        elements = spread(first, counts, int(counts.sum()))
        values, weights = value.values().index_select(0, elements), value.weights_or_none()
        weights = None if weights is None else weights.index_select(0, elements)
        lengths = counts.to(value.lengths().dtype)
        if isinstance(value, KeyedJaggedTensor):
            cut[name] = KeyedJaggedTensor(value.keys(), values, weights, lengths, stride=len(row_of))
        else:
            cut[name] = JaggedTensor(values, weights, lengths)
    return whole.replaced(cut, len(row_of), num_samples)


def check_cut(whole: Rows, cut: Rows, pieces: np.ndarray, rules: CutRules) -> None:
    """Raises a RuntimeError unless the pieces from `cut_rows`, joined again, equal the batch as loaded."""
    pieces, row_of = _with_padding(whole, pieces)
    for name, value in whole.fields.items():
        of_whole = _whole_fields(name, value, pieces, row_of, rules)
        begins, ends = spans(*of_whole)
        own_begins, own_ends = own_spans(*of_whole)
        # A piece that does not get a dense value has a row of zeros in its place.
        held = (np.ones_like(begins) if isinstance(value, torch.Tensor) else ends - begins).T.ravel()
        starts = np.cumsum(held) - held + (own_begins - begins).T.ravel()
        counts = (own_ends - own_begins).T.ravel()
        own = spread(torch.from_numpy(starts), torch.from_numpy(counts), int(counts.sum()))
        rows = np.tile(row_of, begins.shape[1]).repeat(counts)
        for field in Field.of(name, value):
            differs = field.to_words(cut.fields[name])[own] != field.to_words(value)
            for row in rows[differs.any(1).numpy()][:1]:
                raise RuntimeError(f"the pieces of row {row} do not make up the sample that was cut")


def _with_padding(whole: Rows, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Appends the padding rows, which stay whole, to the pieces. Returns the pieces and the row of each."""
    pieces = np.append(pieces, np.zeros(whole.num_rows - whole.num_samples, dtype=PIECE))
    return pieces, np.cumsum(pieces["first_item"] == 0) - 1


def _whole_fields(
    name: str, value: FieldValue, pieces: np.ndarray, row_of: np.ndarray, rules: CutRules
) -> tuple[Sequence[FieldRule], np.ndarray, np.ndarray]:
    """Returns the arguments of `spans` for a field: rules, lengths of each piece's sample, and pieces."""
    if isinstance(value, torch.Tensor):
        return [rules.rule(name)], np.ones((len(row_of), 1), dtype=np.int64), pieces
    keys = value.keys() if isinstance(value, KeyedJaggedTensor) else [""]
    num_rows = value.stride() if isinstance(value, KeyedJaggedTensor) else len(value.lengths())
    lengths = lengths_of(value).view(len(keys), num_rows).long().numpy()
    return [rules.rule(f"{name}.{key}") for key in keys], lengths[:, row_of].T, pieces
