"""The fields that rows consist of, and the tensors of words that hold them when they are packed."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

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

    An element, of the widest words that divide it, is a value of a jagged field or a row of a dense one.

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

    def to_words(self, value: FieldValue) -> torch.Tensor:
        """Returns these values or weights of a field as words, `[elements, words]`."""
        tensor = value
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.weights() if self.is_weights else tensor.values()
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if flat.storage_offset() * self.dtype.itemsize % self.width or flat.stride(0) != 1:
            # torch views as words only what starts at a multiple of one; a lone element may have any stride.
            flat = flat.clone(memory_format=torch.contiguous_format)
        return flat.view(WORD_DTYPES[self.width]).view(tensor.shape[0], self.element_bytes // self.width)

    def from_words(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the elements in contiguous `words`, `[elements, words]`, as a view of them."""
        if words.numel() == 0:  # torch refuses views of another dtype at some offsets, even of nothing
            return words.new_empty((len(words), *self.trailing_shape), dtype=self.dtype)
        return words.view(-1).view(self.dtype).view(len(words), *self.trailing_shape)


class Section(NamedTuple):
    """Fields that one tensor of words holds.

    Dense fields with words of one width lie side by side, `[rows, words]`. Jagged ones with elements of one
    size follow one another, `[elements, words]`: all rows of a field's first key, then all of the second, ...

    Attributes:
        width: bytes of one word.
        words: words of one row of dense fields, or of one element of jagged ones.
        keys: int64 `[columns]`, where the keys of its jagged fields are among those of the schema.
    """

    fields: list[Field]
    is_dense: bool
    width: int
    words: int
    keys: np.ndarray


@dataclass(frozen=True)
class Schema:
    """The per-sample fields of a batch, and with them the layout of its packed rows.

    Lengths of rows are int64 `[rows, keys]`, of every key of every jagged field.
    """

    fields: tuple[Field, ...]

    @staticmethod
    def of(fields: Mapping[str, FieldValue]) -> Schema:
        """Returns the schema of a batch's per-sample fields; equal ones are one object."""
        return _interned(tuple(field for name, value in fields.items() for field in Field.of(name, value)))

    @cached_property
    def jagged_fields(self) -> tuple[Field, ...]:
        """Fields whose rows differ in length, each once."""
        return tuple(field for field in self.fields if not (field.is_dense or field.is_weights))

    @cached_property
    def keys(self) -> dict[str, np.ndarray]:
        """Where the keys of each jagged field are among those of all, int64 `[keys]` by its name."""
        ends = np.cumsum([len(field.keys) for field in self.jagged_fields])[:-1]
        by_field = np.split(np.arange(self.num_keys), ends)
        return {field.name: keys for field, keys in zip(self.jagged_fields, by_field, strict=False)}

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
        sections = []
        for (_, size), fields in sorted(members.items()):
            width, of_one = fields[0].width, fields[:1] if size else fields
            words = sum(field.element_bytes for field in of_one) // width
            keys = [np.zeros(0, dtype=np.int64), *(self.keys[field.name] for field in fields if size)]
            sections.append(Section(fields, not size, width, words, np.concatenate(keys)))
        return tuple(sections)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Returns how many rows of words each row has, int64 `[sections, rows]`: 1, or its elements."""
        ones = np.ones(len(lengths), dtype=np.int64)
        return np.stack([ones if of.is_dense else lengths[:, of.keys].sum(1) for of in self.sections])

    @cached_property
    def section_bytes(self) -> np.ndarray:
        """Bytes of a row of words of each section, int64 `[sections]`."""
        return np.array([section.width * section.words for section in self.sections])

    def row_bytes(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the bytes of rows, int64 `[rows]`: their values and weights, and an int32 per length."""
        return self.section_bytes @ self.sizes(lengths) + LENGTH_WIDTH * self.num_keys

    def chunk_bytes(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the bytes of chunks in a buffer, int64 `[chunks]`, each a multiple of `BUFFER_ALIGNMENT`.

        `sizes` are the rows of words of each, int64 `[sections, chunks]`.
        """
        return -(self.section_bytes @ -sizes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT

    def num_elements(self, lengths: np.ndarray) -> list[int]:
        """Returns the elements of each jagged field in rows of these lengths."""
        return [int(lengths[:, keys].sum()) for keys in self.keys.values()]

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


def hash_bytes(data: bytes) -> int:
    """Returns a 63-bit hash, the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def lengths_of(value: JaggedTensor | KeyedJaggedTensor) -> torch.Tensor:
    """Returns the lengths of a jagged value, without its keeping them if it was made of offsets.

    A copy to the device would take them along, from memory that is not pinned, and wait.
    """
    lengths = value.lengths_or_none() if hasattr(value, "lengths_or_none") else value.lengths()
    return value.offsets().diff() if lengths is None else lengths


def with_parts(value: Any, **parts: Any) -> Any:
    """Returns a jagged value with other "values", "weights", "lengths", or what else makes one."""
    parts = {"values": value.values(), "lengths": lengths_of(value)} | parts
    weights = parts.pop("weights", value.weights_or_none())
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=value.keys(), weights=weights, stride=value.stride(), **parts)
    return JaggedTensor(weights=weights, **parts)


# Batches of a training run share a schema, and what is worked out of it.
_interned = functools.lru_cache(maxsize=256)(Schema)
