"""Hashes of rows, for comparisons between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch

from ..sequence_batch.packed_rows import spread
from ..sequence_batch.row_schema import FieldValue


def row_hashes(fields: Mapping[str, FieldValue], num_rows: int) -> np.ndarray:
    """Returns a hash of each row, int64 `[rows]`: a sum over its elements, wrapping around."""
    total = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    for name, value in fields.items():
        rows, positions, hashes = hash_elements(name, value, num_rows)
        key, row = rows // max(num_rows, 1), rows % max(num_rows, 1)
        total.index_add_(0, row, mix(hashes, positions, key))
    return total.numpy()


def hash_elements(
    name: str, value: FieldValue, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each element key · rows + row, its position in the row, and its hash; int64 on the host."""
    if isinstance(value, torch.Tensor):
        rows = torch.arange(num_rows, device="cpu")
        positions, parts = torch.zeros(num_rows, dtype=torch.int64, device="cpu"), [value]
    else:
        lengths = value.lengths().cpu().long()
        rows = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
        positions = spread(torch.zeros_like(lengths), lengths, len(rows))
        parts = [part for part in (value.values(), value.weights_or_none()) if part is not None]
    seed = torch.tensor(zlib.crc32(name.encode()), device="cpu")
    hashes = seed.expand(len(rows))
    for part in parts:
        flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        element_bytes = torch.zeros(len(rows), 0, dtype=torch.uint8, device="cpu")
        if flat.numel():
            element_bytes = flat.view(len(rows), -1).view(torch.uint8)
        for byte in element_bytes.long().unbind(1):
            hashes = mix(hashes, byte, seed)
    return rows, positions, hashes


def mix(*numbers: torch.Tensor) -> torch.Tensor:
    """Returns a hash of int64 numbers, element by element."""
    mixed = torch.zeros((), dtype=torch.int64, device="cpu")
    for number in numbers:
        mixed = (mixed ^ number) * -7046029254386353131
        mixed = mixed ^ (mixed >> 29)
    return mixed
