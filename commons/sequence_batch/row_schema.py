"""The fields that rows consist of, and the tensors of words that hold them when they are packed."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from .optional_types import JaggedTensor, KeyedJaggedTensor

FieldValue: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor

WORD_DTYPES: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
LENGTH_WIDTH = 4  # lengths travel as int32, in the planning gather
BUFFER_ALIGNMENT = max(WORD_DTYPES)


@dataclass(frozen=True)
class Field:
    """The values, or the weights, of one field of a batch: what ranks must agree on to exchange its rows.

    As words, an element takes the widest that divide it. It is a value of a jagged field, or a row of a dense
    one.

    Attributes:
        name: the field's name in the batch.
        kind: "keyed" (KeyedJaggedTensor), "jagged" (JaggedTensor) or "dense" (tensor).
        keys: keys of a KeyedJaggedTensor; one empty name otherwise.
        trailing_shape: shape of one element.
        lengths_dtype: None for a dense field.
        is_weights: whether these are the weights.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    dtype: torch.dtype
    trailing_shape: tuple[int, ...]
    lengths_dtype: torch.dtype | None = None
    is_weights: bool = False

    @staticmethod
    def of(name: str, value: FieldValue) -> list[Field]:
        """Returns the values of a field, and the weights if it has some."""
        if isinstance(value, torch.Tensor):
            return [Field(name, "dense", ("",), value.dtype, tuple(value.shape[1:]))]
        keyed = isinstance(value, KeyedJaggedTensor)
        kind, keys = ("keyed", tuple(value.keys())) if keyed else ("jagged", ("",))
        parts = {False: value.values(), True: value.weights_or_none()}
        return [
            Field(name, kind, keys, part.dtype, tuple(part.shape[1:]), lengths_of(value).dtype, is_weights)
            for is_weights, part in parts.items()
            if part is not None
        ]

    def __str__(self) -> str:
        return f"{self.name} (weights)" if self.is_weights else self.name

    @property
    def is_dense(self) -> bool:
        """Whether every row has the same size."""
        return self.kind == "dense"

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize * math.prod(self.trailing_shape)

    @cached_property
    def width(self) -> int:
        """Bytes of one word."""
        return next(width for width in WORD_DTYPES if self.element_bytes % width == 0)

    @cached_property
    def words(self) -> int:
        """Words of one element."""
        return self.element_bytes // self.width

    def to_words(self, value: FieldValue) -> torch.Tensor:
        """Returns these values or weights of a field as words, `[elements, words]`."""
        tensor = value
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.weights() if self.is_weights else tensor.values()
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if flat.storage_offset() * self.dtype.itemsize % self.width or flat.stride(0) != 1:
            # torch views as words only what starts at a multiple of one; a lone element may have any stride.
            flat = flat.clone(memory_format=torch.contiguous_format)
        words = WORD_DTYPES[self.width]
        flat = flat if self.dtype == words else flat.view(words)
        return flat.view(tensor.shape[0], self.words)

    def from_words(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the elements in contiguous `words`, `[elements, words]`, as a view of them."""
        if words.numel() == 0:  # torch refuses views of another dtype at some offsets, even of nothing
            return words.new_empty((len(words), *self.trailing_shape), dtype=self.dtype)
        flat = words.view(-1)
        flat = flat if self.dtype == words.dtype else flat.view(self.dtype)
        return flat.view(len(words), *self.trailing_shape)


@dataclass(frozen=True, eq=False)
class Section:
    """Fields that one tensor of words holds.

    Dense fields with words of one width lie side by side, `[rows, words]`. Jagged ones with elements of one
    size follow one another, `[elements, words]`: all rows of a field's first key, then all of the second, ...

    Attributes:
        keys_of_fields: int64 `[keys]` of each jagged field: where its keys are among those of all fields.
    """

    fields: tuple[Field, ...]
    is_dense: bool
    keys_of_fields: tuple[np.ndarray, ...]

    @cached_property
    def keys(self) -> np.ndarray:
        """int64 `[columns]`, the keys of all jagged fields, one field after another."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.keys_of_fields])

    @cached_property
    def width(self) -> int:
        """Bytes of one word."""
        return self.fields[0].width

    @cached_property
    def words(self) -> int:
        """Words of one row of dense fields, or of one element of jagged ones."""
        return sum(field.words for field in self.fields) if self.is_dense else self.fields[0].words

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Returns how many rows of words each row has, int64 `[rows]`: 1, or its elements.

        `lengths` is int64 `[rows, keys]`.
        """
        if self.is_dense:
            return np.ones(len(lengths), dtype=np.int64)
        return lengths[:, self.keys].sum(1)


@dataclass(frozen=True)
class Schema:
    """The per-sample fields of a batch, and with them the layout of its packed rows."""

    fields: tuple[Field, ...]

    @staticmethod
    def of(fields: Mapping[str, FieldValue]) -> Schema:
        """Returns the schema of a batch's per-sample fields; equal ones are one object."""
        return _interned(tuple(field for name, value in fields.items() for field in Field.of(name, value)))

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash, the same in every process."""
        return hash_bytes([repr(self.fields).encode()])

    @cached_property
    def jagged_fields(self) -> tuple[Field, ...]:
        """Fields whose rows differ in length, each once."""
        return tuple(field for field in self.fields if not (field.is_dense or field.is_weights))

    @cached_property
    def num_keys(self) -> int:
        """Keys of all jagged fields together: each row has as many lengths."""
        return sum(len(field.keys) for field in self.jagged_fields)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The tensors that hold the fields.

        The widest words come first: in a buffer in which one section follows another, each starts at a
        multiple of its words.
        """
        members: dict[tuple[int, int], list[Field]] = {}
        for field in self.fields:
            size = 0 if field.is_dense else field.element_bytes + 1
            members.setdefault((-field.width, size), []).append(field)
        ends = np.cumsum([0] + [len(field.keys) for field in self.jagged_fields])
        spans = zip(self.jagged_fields, pairwise(ends), strict=True)
        keys = {field.name: np.arange(*span) for field, span in spans}
        return tuple(
            Section(tuple(fields), not size, tuple(keys[field.name] for field in fields if size))
            for (_, size), fields in sorted(members.items())
        )

    def row_bytes(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the bytes of rows, int64 `[rows]`: their values and weights, and an int32 per length.

        Args:
            lengths: int64 `[rows, keys]`, lengths of every key of every jagged field.
        """
        per_row, per_element = self._bytes
        return lengths @ per_element + per_row

    @cached_property
    def _bytes(self) -> tuple[int, np.ndarray]:
        """Bytes of each row, and int64 `[keys]` those of each element of a key."""
        per_row, per_element = LENGTH_WIDTH * self.num_keys, np.zeros(self.num_keys, dtype=np.int64)
        for section in self.sections:
            if section.is_dense:
                per_row += section.width * section.words
            else:
                np.add.at(per_element, section.keys, section.width * section.words)
        return per_row, per_element

    def chunk_bytes(self, lengths: np.ndarray) -> int:
        """Returns the aligned bytes that rows of these lengths, int64 `[rows, keys]`, take in a buffer."""
        sizes = (int(of.sizes(lengths).sum()) * of.width * of.words for of in self.sections)
        return int(aligned(np.array(sum(sizes))))

    def num_elements(self, lengths: np.ndarray) -> list[int]:
        """Returns the elements of each jagged field in rows of int64 `[rows, keys]` lengths."""
        ends = np.cumsum([len(field.keys) for field in self.jagged_fields])[:-1]
        by_field = np.split(lengths.sum(0), ends) if self.jagged_fields else []
        return [int(of_keys.sum()) for of_keys in by_field]

    def difference(self, other: Schema) -> str:
        """Returns one line that tells where `other` differs from this schema; empty if it does not."""
        if other is self:
            return ""
        mine, theirs = ({str(field): field for field in schema.fields} for schema in (self, other))
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in theirs or name not in mine:
                return f"field {name!r} is {'missing' if name in mine else 'unexpected'}"
            for attribute in Field.__dataclass_fields__:
                expected, got = getattr(mine[name], attribute), getattr(theirs[name], attribute)
                if expected != got:
                    return f"field {name!r} has {attribute} {got}, expected {expected}"
        in_order = list(mine) == list(theirs)
        return "" if in_order else f"fields are in order {list(theirs)}, expected {list(mine)}"


def hash_bytes(parts: Iterable[bytes]) -> int:
    """Returns a 63-bit hash of bytes, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def lengths_of(value: JaggedTensor | KeyedJaggedTensor) -> torch.Tensor:
    """Returns the lengths of a jagged value, without its keeping them if it was made of offsets.

    A copy to the device would take them along, from memory that is not pinned, and wait.
    """
    lengths = value.lengths_or_none() if hasattr(value, "lengths_or_none") else value.lengths()
    return value.offsets().diff() if lengths is None else lengths


def with_parts(value: JaggedTensor | KeyedJaggedTensor, **parts: torch.Tensor) -> FieldValue:
    """Returns a jagged value with other "values", "weights" or "lengths"."""
    parts = {"values": value.values(), "lengths": lengths_of(value)} | parts
    weights = parts.pop("weights", value.weights_or_none())
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=value.keys(), weights=weights, stride=value.stride(), **parts)
    return JaggedTensor(weights=weights, **parts)


# Batches of a training run share a schema, and what is worked out of it.
_interned = functools.lru_cache(maxsize=256)(Schema)


def aligned(num_bytes: np.ndarray) -> np.ndarray:
    """Returns the next multiples of `BUFFER_ALIGNMENT`."""
    return -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
