"""The fields that rows consist of, and how packed rows lay them out."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

FieldValue: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor

WORD_DTYPES: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
LENGTH_WIDTH = 4  # lengths travel as int32
FIELD_ALIGNMENT = 16  # what kernels that load vectors of words expect of the tensors they are given
BUFFER_ALIGNMENT = max(WORD_DTYPES)


@dataclass(frozen=True)
class FieldSchema:
    """The properties of one field that ranks must agree on to exchange its rows.

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
        """Returns the schema of a field's value."""
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
    """The values or the weights of one field, as words: the widest that divide an element.

    Attributes:
        field: the field's name.
        dtype: of the elements.
        element_shape: shape of one element of a jagged field, of one row of a dense one.
        jagged_field: the index of the field among the jagged ones; -1 for a dense field.
        num_keys: keys of the field.
        is_weights: whether these are the weights.
    """

    field: str
    dtype: torch.dtype
    element_shape: tuple[int, ...]
    jagged_field: int = -1
    num_keys: int = 1
    is_weights: bool = False

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize * math.prod(self.element_shape)

    @cached_property
    def width(self) -> int:
        """Bytes of one word."""
        return next(width for width in WORD_DTYPES if self.element_bytes % width == 0)

    @cached_property
    def words(self) -> int:
        """Words of one element."""
        return self.element_bytes // self.width

    def to_words(self, value: FieldValue) -> torch.Tensor:
        """Returns the block's part of a field's value, `[elements, words]`."""
        tensor = value
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.weights() if self.is_weights else tensor.values()
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if flat.storage_offset() * self.dtype.itemsize % self.width:
            flat = flat.clone()  # torch views as words only what starts at a multiple of one
        return flat.view(WORD_DTYPES[self.width]).view(tensor.shape[0], self.words)

    def from_words(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the elements in `words`, `[elements, words]`, as a view if these are contiguous."""
        return words.reshape(-1).view(self.dtype).view(len(words), *self.element_shape)


@dataclass(frozen=True)
class Group:
    """Values and weights of jagged fields with elements of one size: one tensor of words holds them all.

    Each key of a block is a column: its elements follow one another, row by row.

    Attributes:
        blocks: the values and weights, in the order in which they follow one another.
        block_slice: where they are among the blocks of all groups.
        keys: int64 `[columns]`, the key of each column among those of all jagged fields.
    """

    blocks: tuple[Block, ...]
    block_slice: slice
    keys: np.ndarray = field(compare=False)

    @cached_property
    def width(self) -> int:
        """Bytes of one word."""
        return self.blocks[0].width

    @cached_property
    def words(self) -> int:
        """Words of one element."""
        return self.blocks[0].words

    @cached_property
    def last_columns(self) -> np.ndarray:
        """int64 `[blocks]`: the last column of each block."""
        return np.cumsum([block.num_keys for block in self.blocks]) - 1


@dataclass(frozen=True)
class RowSchema:
    """The per-sample fields of a batch, and with them the layout of its packed rows."""

    fields: tuple[FieldSchema, ...]

    @staticmethod
    def of(fields: Mapping[str, FieldValue]) -> RowSchema:
        """Returns the schema of a batch's per-sample fields; equal ones are one object."""
        return _interned(tuple(FieldSchema.of(name, value) for name, value in fields.items()))

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
    def dense_blocks(self) -> dict[int, tuple[Block, ...]]:
        """Dense fields by the width of their words."""
        blocks = [Block(f.name, f.dtype, f.trailing_shape) for f in self.fields if f.is_dense]
        by_width = {width: tuple(block for block in blocks if block.width == width) for width in WORD_DTYPES}
        return {width: of_width for width, of_width in by_width.items() if of_width}

    @cached_property
    def dense_words(self) -> dict[int, int]:
        """Words per row of the dense fields, by width."""
        return {width: sum(block.words for block in blocks) for width, blocks in self.dense_blocks.items()}

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Values and weights of the jagged fields, by the size of their elements."""
        of_size: dict[int, list[Block]] = {}
        for number, field in enumerate(self.jagged_fields):
            keys = len(field.keys)
            blocks = [Block(field.name, field.dtype, field.trailing_shape, number, keys)]
            if field.weights_dtype is not None:
                shape = field.weights_trailing_shape
                blocks.append(Block(field.name, field.weights_dtype, shape, number, keys, is_weights=True))
            for block in blocks:
                of_size.setdefault(block.element_bytes, []).append(block)
        first_key = np.cumsum([0, *(len(field.keys) for field in self.jagged_fields)])
        groups: list[Group] = []
        first = 0
        # Widest words first: sections of a buffer, one after another, then start at multiples of their words.
        for blocks in sorted(of_size.values(), key=lambda blocks: -blocks[0].width):
            keys = [first_key[block.jagged_field] + np.arange(block.num_keys) for block in blocks]
            groups.append(Group(tuple(blocks), slice(first, first + len(blocks)), np.concatenate(keys)))
            first += len(blocks)
        return tuple(groups)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all groups."""
        return tuple(block for group in self.groups for block in group.blocks)

    def block_elements(self, num_elements: np.ndarray) -> np.ndarray:
        """Returns the elements of each block, int64 `[parts, blocks]`.

        Args:
            num_elements: int64 `[parts, jagged fields]`, elements of each jagged field in parts of a batch.
        """
        return num_elements[:, self._block_fields]

    def alignment_padding(self, elements: np.ndarray) -> np.ndarray:
        """Returns the elements to add to each block so that the next is aligned, int64 `[parts, blocks]`.

        Args:
            elements: int64 `[parts, blocks]`, elements of each block.
        """
        return -elements % self._aligned_elements

    @cached_property
    def _block_fields(self) -> np.ndarray:
        return np.array([block.jagged_field for block in self.blocks], dtype=np.int64)

    @cached_property
    def _aligned_elements(self) -> np.ndarray:
        """int64 `[blocks]`: the fewest elements that fill up a multiple of `FIELD_ALIGNMENT`."""
        units = [FIELD_ALIGNMENT // math.gcd(block.element_bytes, FIELD_ALIGNMENT) for block in self.blocks]
        return np.array(units, dtype=np.int64)

    def row_bytes(self, num_elements: np.ndarray) -> np.ndarray:
        """Returns the bytes that rows take in a buffer, int64 `[rows]`.

        Args:
            num_elements: int64 `[rows, jagged fields]`, elements of each row in each jagged field.
        """
        return self._fixed_bytes + num_elements @ self._bytes_per_element

    @cached_property
    def _fixed_bytes(self) -> int:
        """Bytes of a row without elements in jagged fields."""
        return LENGTH_WIDTH * self.num_keys + sum(w * words for w, words in self.dense_words.items())

    @cached_property
    def _bytes_per_element(self) -> np.ndarray:
        """int64 `[jagged fields]`."""
        num_bytes = np.zeros(len(self.jagged_fields), dtype=np.int64)
        for block in self.blocks:
            num_bytes[block.jagged_field] += block.element_bytes
        return num_bytes

    def difference(self, other: RowSchema) -> str:
        """Returns one line that tells where `other` differs from this schema; empty if it does not."""
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


# Batches of a training run share a schema, and what is worked out of it.
_interned = functools.lru_cache(maxsize=256)(RowSchema)


def aligned(num_bytes: np.ndarray) -> np.ndarray:
    """Returns the next multiples of `BUFFER_ALIGNMENT`."""
    return -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
