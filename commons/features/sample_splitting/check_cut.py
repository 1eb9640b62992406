"""Compares samples with their pieces put together again."""

from __future__ import annotations

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ...sequence_batch import BaseBatch
from ...sequence_batch.cut_rules import PIECE, CutRules
from ...sequence_batch.row_hashes import hash_elements, mix, row_hashes
from ...sequence_batch.row_schema import FieldValue


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
        rows, positions, hashes = hash_elements(name, value, len(row_of))
        key, piece = rows // len(row_of), rows % len(row_of)
        begin, own_begin, own_end = _spans(name, fields[name], row_of, pieces, rules)[:, rows]
        places = positions + begin
        is_own = (places >= own_begin) & (places < own_end)
        mixed = mix(hashes, places, key)[is_own]
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
