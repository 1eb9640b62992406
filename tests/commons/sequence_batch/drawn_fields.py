"""Fields of any kind, dtype and shape, drawn from a seed, and the bytes of each of their rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.commons.sequence_batch.internals import FieldValue

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (), (1,), (3,), (2, 4), (0,)]


def draw_fields(seed: int, rng: np.random.Generator, num_rows: int) -> dict[str, FieldValue]:
    """Draws one to five fields of `num_rows` rows: what they are from `seed`, what is in them from `rng`."""
    kinds = np.random.default_rng(seed)
    fields: dict[str, FieldValue] = {}
    for number in range(kinds.integers(1, 6)):
        kind, num_keys = kinds.choice(["dense", "jagged", "keyed"]), int(kinds.integers(0, 4))
        formats = [(DTYPES[kinds.integers(len(DTYPES))], SHAPES[kinds.integers(len(SHAPES))]) for _ in "vw"]
        has_weights, lengths_dtype = kinds.random() < 0.5, [torch.int32, torch.int64][kinds.integers(2)]
        num_keys = num_keys if kind == "keyed" else 1
        lengths = torch.from_numpy(rng.integers(0, 4, num_keys * num_rows)).to(lengths_dtype)
        values, weights = (_drawn(rng, int(lengths.sum()), *of) for of in formats)
        parts = {"values": values, "lengths": lengths, "weights": weights if has_weights else None}
        if kind == "dense":
            fields[f"field {number}"] = _drawn(rng, num_rows, *formats[0])
        elif kind == "jagged":
            fields[f"field {number}"] = JaggedTensor(**parts)
        else:
            keys = [f"key {key}" for key in range(num_keys)]
            fields[f"field {number}"] = KeyedJaggedTensor(keys, stride=num_rows, **parts)
    return fields


def _drawn(rng: np.random.Generator, num_elements: int, dtype: torch.dtype, shape: tuple[int, ...]):
    """Any bits, sometimes in memory that starts anywhere, or as a lazy conjugate."""
    skipped = int(rng.integers(0, 3))
    size = (num_elements + skipped) * int(np.prod(shape, dtype=int)) * dtype.itemsize
    if dtype == torch.complex128 and not size:  # torch gives empty arrays a stride of 0
        return torch.from_numpy(np.empty((num_elements, *shape), np.complex128))
    drawn = torch.from_numpy(rng.integers(0, 2 if dtype == torch.bool else 256, size))
    drawn = torch.empty(size, dtype=torch.uint8).copy_(drawn)
    values = drawn.view(dtype).view(num_elements + skipped, *shape)[skipped:]
    return values.conj() if dtype.is_complex and skipped else values


def bytes_of_rows(fields: dict[str, FieldValue], num_rows: int) -> list[list[bytes]]:
    """Returns for each row the bytes of each field, key by key, values and weights."""
    rows: list[list[bytes]] = [[] for _ in range(num_rows)]
    for value in fields.values():
        if isinstance(value, torch.Tensor):
            _append(rows, value, [1] * num_rows)
            continue
        lengths = value.lengths().tolist()
        for part in (value.values(), value.weights_or_none()):
            if part is not None:
                num_keys = len(lengths) // num_rows if num_rows else 0
                _append([rows[row] for _ in range(num_keys) for row in range(num_rows)], part, lengths)
    return rows


def _append(to: Sequence[list[bytes]], values: torch.Tensor, lengths: list[int]) -> None:
    for row, part in zip(to, values.resolve_conj().split(lengths), strict=True):
        flat = part.reshape(-1).clone(
            memory_format=torch.contiguous_format
        )  # a lone element may have any stride
        row.append(flat.view(torch.uint8).numpy().tobytes())
