"""What the rows of a batch consist of, and how many machine words they take."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

FieldValue: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor

# Widest first, so that in a buffer of all widths one behind the other every block is aligned.
WORD_DTYPES: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
LENGTH_WIDTH = 4  # lengths travel as int32
BUFFER_ALIGNMENT = max(WORD_DTYPES)


@dataclass(frozen=True)
class FieldSchema:
    """What ranks must agree on to exchange the rows of one field.

    Attributes:
        name: the field's name in the batch.
        kind: "keyed" (KeyedJaggedTensor), "jagged" (JaggedTensor) or "dense" (tensor).
        keys: keys of a KeyedJaggedTensor; one empty name otherwise.
        dtype: of the values.
        trailing_shape: shape of one value of a jagged field, of one row of a dense one.
        weights_dtype: of the weights, None without weights.
        weights_trailing_shape: shape of one weight.
        lengths_dtype: of the lengths, None for a dense field.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    dtype: torch.dtype
    trailing_shape: tuple[int, ...]
    weights_dtype: torch.dtype | None = None
    weights_trailing_shape: tuple[int, ...] = ()
    lengths_dtype: torch.dtype | None = None

    @staticmethod
    def of(name: str, value: FieldValue) -> FieldSchema:
        """The schema of a field's value."""
        if isinstance(value, torch.Tensor):
            return FieldSchema(name, "dense", ("",), value.dtype, tuple(value.shape[1:]))
        weights = value.weights_or_none()
        keyed = isinstance(value, KeyedJaggedTensor)
        return FieldSchema(
            name=name,
            kind="keyed" if keyed else "jagged",
            keys=tuple(value.keys()) if keyed else ("",),
            dtype=value.values().dtype,
            trailing_shape=tuple(value.values().shape[1:]),
            weights_dtype=None if weights is None else weights.dtype,
            weights_trailing_shape=() if weights is None else tuple(weights.shape[1:]),
            lengths_dtype=value.lengths().dtype,
        )

    @property
    def is_dense(self) -> bool:
        """Whether every row has the same size."""
        return self.kind == "dense"


@dataclass(frozen=True)
class Block:
    """The values or the weights of one field, as words of one width."""

    field: FieldSchema
    is_weights: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        weights_dtype = self.field.weights_dtype
        return weights_dtype if self.is_weights and weights_dtype is not None else self.field.dtype

    @property
    def trailing_shape(self) -> tuple[int, ...]:
        """Of one element."""
        return self.field.weights_trailing_shape if self.is_weights else self.field.trailing_shape

    @property
    def width(self) -> int:
        """Bytes per word."""
        return min(8, self.dtype.itemsize)

    @property
    def words(self) -> int:
        """Words per element of a jagged field, per row of a dense one."""
        return self.dtype.itemsize // self.width * math.prod(self.trailing_shape)

    def to_words(self, value: FieldValue) -> torch.Tensor:
        """The block's part of a field's value, flat."""
        if isinstance(value, torch.Tensor):
            tensor = value
        else:
            tensor = value.weights() if self.is_weights else value.values()
        return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(WORD_DTYPES[self.width])

    def from_words(self, words: torch.Tensor, elements: int) -> torch.Tensor:
        """`elements` elements from their words."""
        flat = words.reshape(-1)
        if self.dtype.itemsize > self.width and flat.storage_offset() % 2:
            flat = flat.clone()  # torch views a pair of words as one element only where pairs start
        return flat.view(self.dtype).view(elements, *self.trailing_shape)


@dataclass(frozen=True)
class RowSchema:
    """The per-sample fields of a batch, and with them the layout of its packed rows."""

    fields: tuple[FieldSchema, ...]

    @staticmethod
    def of(fields: Mapping[str, FieldValue]) -> RowSchema:
        """The schema of a batch's per-sample fields."""
        return RowSchema(tuple(FieldSchema.of(name, value) for name, value in fields.items()))

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash, the same in every process."""
        digest = hashlib.blake2b(repr(self.fields).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    @cached_property
    def jagged_fields(self) -> tuple[FieldSchema, ...]:
        """Fields whose rows differ in length."""
        return tuple(field for field in self.fields if not field.is_dense)

    @cached_property
    def num_keys(self) -> int:
        """Keys of all jagged fields together: each row has as many lengths."""
        return sum(len(field.keys) for field in self.jagged_fields)

    @cached_property
    def fixed_blocks(self) -> dict[int, list[Block]]:
        """Dense fields by word width."""
        return _by_width([Block(f) for f in self.fields if f.is_dense])

    @cached_property
    def jagged_blocks(self) -> dict[int, list[Block]]:
        """Values and weights of the jagged fields by word width."""
        values = [Block(f) for f in self.jagged_fields]
        weights = [Block(f, is_weights=True) for f in self.jagged_fields if f.weights_dtype is not None]
        return _by_width(values + weights)

    @cached_property
    def fixed_words(self) -> dict[int, int]:
        """Words per row of the dense fields, by width."""
        return {width: sum(block.words for block in blocks) for width, blocks in self.fixed_blocks.items()}

    def jagged_words(self, num_elements: Sequence[int]) -> dict[int, int]:
        """Words, by width, of jagged fields that have `num_elements[i]` elements in field i."""
        elements = dict(zip(self.jagged_fields, num_elements, strict=True))
        return {
            width: sum(block.words * elements[block.field] for block in blocks)
            for width, blocks in self.jagged_blocks.items()
        }

    def jagged_words_of_chunks(self, num_elements: np.ndarray) -> dict[int, np.ndarray]:
        """int64 `[chunks]` words, by width; `num_elements` int64 `[chunks, jagged fields]`."""
        words = [self.jagged_words(of_chunk) for of_chunk in num_elements.tolist()]
        return {width: np.array([of_chunk[width] for of_chunk in words]) for width in self.jagged_blocks}

    def row_bytes(self, num_elements: np.ndarray) -> np.ndarray:
        """int64 `[rows]`: bytes of rows that have `num_elements[row, i]` elements in jagged field i."""
        return self._fixed_bytes + num_elements @ self._bytes_per_element

    @cached_property
    def _fixed_bytes(self) -> int:
        """Of a row, whatever its lengths."""
        return LENGTH_WIDTH * self.num_keys + _total_bytes(self.fixed_words)

    @cached_property
    def _bytes_per_element(self) -> np.ndarray:
        """int64 `[jagged fields]`."""
        of_one_element = np.eye(len(self.jagged_fields), dtype=np.int64).tolist()
        return np.array([_total_bytes(self.jagged_words(row)) for row in of_one_element], dtype=np.int64)

    def difference(self, other: RowSchema) -> str:
        """One line that says where `other` differs from this schema, empty if it does not."""
        mine = {field.name: field for field in self.fields}
        theirs = {field.name: field for field in other.fields}
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in theirs or name not in mine:
                return f"field {name!r} is {'missing' if name in mine else 'unexpected'}"
            for attribute in FieldSchema.__dataclass_fields__:
                expected, got = getattr(mine[name], attribute), getattr(theirs[name], attribute)
                if expected != got:
                    return f"field {name!r} has {attribute} {got}, expected {expected}"
        return (
            "" if list(mine) == list(theirs) else f"fields are in order {list(theirs)}, expected {list(mine)}"
        )


@functools.lru_cache(maxsize=256)
def jagged_columns(schema: RowSchema, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What the jagged columns of one word width are: one per key of each block.

    Returns:
        int64 `[columns]` the position of the column's key among the keys of all jagged fields, and int64
        `[columns]` its words per element.
    """
    first_key, total = {}, 0
    for field in schema.jagged_fields:
        first_key[field] = total
        total += len(field.keys)
    blocks = schema.jagged_blocks[width]
    keys = [first_key[block.field] + key for block in blocks for key in range(len(block.field.keys))]
    words = [block.words for block in blocks for _ in block.field.keys]
    return np.array(keys, dtype=np.int64), np.array(words, dtype=np.int64)


def aligned(num_bytes: np.ndarray) -> np.ndarray:
    """The next multiples of `BUFFER_ALIGNMENT`."""
    return -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def _by_width(blocks: Sequence[Block]) -> dict[int, list[Block]]:
    widths = {width: [block for block in blocks if block.width == width] for width in WORD_DTYPES}
    return {width: of_width for width, of_width in widths.items() if of_width}


def _total_bytes(words: Mapping[int, int]) -> int:
    return sum(width * count for width, count in words.items())
