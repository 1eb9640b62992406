"""The fields of a batch, which are tensors and jagged tensors with a row per sample.

`Field` is the format of one, `Schema` of all, with the layout of the tensors of words that hold packed rows.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from .. import NAME

FieldValue: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor
# Only these exact types of leaves arrive complete: subclasses may hold more.
_EXACT_TYPES = (torch.Tensor, JaggedTensor, KeyedJaggedTensor)

WORD_DTYPES: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
BUFFER_ALIGNMENT = max(WORD_DTYPES)
TAKE_APART = f"take it apart with {NAME}.sequence_batch.register_batch_type"
MORE_KINDS = (
    f"import {NAME}.extensions.more_kinds, for TensorDicts, KeyedTensors and jagged nested tensors, or "
    f"{TAKE_APART}"
)
DECLARE_SHARED = (
    'mark a field of a dataclass with field(metadata={"per_sample": False}); for any other batch, name it in '
    "the shuffler's shared_fields"
)
_BUILD_VBE = "build it after the exchange, as docs/your-own-model.md shows (Request-level batches)"


@dataclass(frozen=True)
class Field:
    """The format of one field's values, or of its weights, on which ranks must agree to exchange rows.

    An element is a value of a jagged field or a row of a dense field, in the widest words that divide it.
    """

    name: str  # path in the batch
    kind: str  # "keyed" (KeyedJaggedTensor), "jagged" (JaggedTensor) or "dense" (tensor)
    keys: tuple[str, ...]  # of a KeyedJaggedTensor; one empty name otherwise
    dtype: torch.dtype
    trailing_shape: tuple[int, ...]  # of one element
    lengths_dtype: torch.dtype | None = None  # None for a dense field, which has no lengths
    is_weights: bool = False

    @staticmethod
    def of(name: str, value: FieldValue) -> list[Field]:
        """Returns the format of a field's values, and the format of its weights if it has any."""
        if isinstance(value, torch.Tensor):
            return [Field(name, "dense", ("",), value.dtype, tuple(value.shape[1:]))]
        keyed = isinstance(value, KeyedJaggedTensor)
        kind, keys = ("keyed", tuple(value.keys())) if keyed else ("jagged", ("",))
        return [
            Field(name, kind, keys, of.dtype, tuple(of.shape[1:]), lengths_of(value).dtype, part == "weights")
            for part, of in parts_of(value).items()
            if part in ("values", "weights")
        ]

    def __str__(self) -> str:
        return f"{self.name} (weights)" if self.is_weights else self.name

    @property
    def is_dense(self) -> bool:
        """Whether every row has the same size."""
        return self.kind == "dense"

    @cached_property
    def element_bytes(self) -> int:
        """The size of one element in bytes."""
        return self.dtype.itemsize * math.prod(self.trailing_shape)

    @cached_property
    def width(self) -> int:
        """The size of one word in bytes."""
        return next(width for width in WORD_DTYPES if self.element_bytes % width == 0)

    def to_words(self, value: FieldValue) -> torch.Tensor:
        """Returns the values, or the weights, of a field as words, `[elements, words]`."""
        tensor = parts_of(value)["weights" if self.is_weights else "values"]
        flat = flattened(tensor)
        if flat.storage_offset() * self.dtype.itemsize % self.width:
            flat = flat.clone()  # a view as words must start at a multiple of their size
        return flat.view(WORD_DTYPES[self.width]).view(tensor.shape[0], self.element_bytes // self.width)

    def from_words(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the elements in contiguous `words`, `[elements, words]`, as a view of them."""
        if words.numel() == 0:  # at some offsets, torch refuses to view even empty tensors as another dtype
            return words.new_empty((len(words), *self.trailing_shape), dtype=self.dtype)
        return words.view(-1).view(self.dtype).view(len(words), *self.trailing_shape)


class Section(NamedTuple):
    """The fields that share one tensor of words.

    Dense fields with words of one width lie side by side, `[rows, words]`. Jagged fields with elements of one
    size follow one another, `[elements, words]`: all rows of a field's first key, then all of its second, …
    """

    fields: list[Field]
    is_dense: bool
    width: int  # bytes of one word
    words: int  # in a row of the dense fields, or in an element of the jagged fields
    keys: np.ndarray  # int64 `[columns]`, positions of the jagged fields' keys among all keys of the schema


@dataclass(frozen=True)
class Schema:
    """The per-sample fields of a batch, which determine the layout of its packed rows.

    Row lengths are int64 `[rows, keys]`, with a column for every key of every jagged field.
    """

    fields: tuple[Field, ...]

    @staticmethod
    def of(fields: Mapping[str, FieldValue]) -> Schema:
        """Returns the schema of a batch's per-sample fields. Equal schemas are one object."""
        return _interned(tuple(field for name, value in fields.items() for field in Field.of(name, value)))

    @cached_property
    def jagged_fields(self) -> tuple[Field, ...]:
        """The fields whose rows differ in length. Their weights are left out."""
        return tuple(field for field in self.fields if not (field.is_dense or field.is_weights))

    @cached_property
    def keys(self) -> dict[str, np.ndarray]:
        """The positions of each jagged field's keys among all keys, int64 `[keys]`, by field name."""
        ends = np.cumsum([len(field.keys) for field in self.jagged_fields])[:-1]
        by_field = np.split(np.arange(self.num_keys), ends)
        return {field.name: keys for field, keys in zip(self.jagged_fields, by_field, strict=False)}

    @cached_property
    def num_keys(self) -> int:
        """The number of keys of all jagged fields, and so the number of lengths of each row."""
        return sum(len(field.keys) for field in self.jagged_fields)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections, widest words first, so that in a buffer each starts at a multiple of its width."""
        members: dict[tuple[int, bool, int], list[Field]] = {}
        for field in self.fields:
            size = 0 if field.is_dense else field.element_bytes
            members.setdefault((-field.width, not field.is_dense, size), []).append(field)
        sections = []
        for (_, is_jagged, _), fields in sorted(members.items()):
            width, of_one = fields[0].width, fields[:1] if is_jagged else fields
            words = sum(field.element_bytes for field in of_one) // width
            keys = [np.zeros(0, dtype=np.int64), *(self.keys[field.name] for field in fields if is_jagged)]
            sections.append(Section(fields, not is_jagged, width, words, np.concatenate(keys)))
        return tuple(sections)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Returns how many rows of words each row takes, int64 `[sections, rows]`: 1 if dense, else one for
        each of its elements."""
        ones = np.ones(len(lengths), dtype=np.int64)
        return np.stack([ones if of.is_dense else lengths[:, of.keys].sum(1) for of in self.sections])

    @cached_property
    def section_bytes(self) -> np.ndarray:
        """The size in bytes of one row of words in each section, int64 `[sections]`."""
        return np.array([section.width * section.words for section in self.sections])

    def row_bytes(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the size of each row in bytes, int64 `[rows]`, with 4 per length: an int32 in planning."""
        return self.section_bytes @ self.sizes(lengths) + 4 * self.num_keys

    def chunk_bytes(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the size of each chunk in bytes, int64 `[chunks]`, rounded up to `BUFFER_ALIGNMENT`, of
        `sizes` rows of words, int64 `[sections, chunks]`."""
        return -(self.section_bytes @ -sizes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT

    def by_name(self, lengths: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the lengths of rows, int64 `[rows]`, by name of the key, as in "features.item", and of the
        field, as in "labels", for all its keys together. `lengths` is int64 `[rows, keys]`."""
        of_fields = {name: lengths[:, keys].sum(1) for name, keys in self.keys.items()}
        names = (f"{field.name}.{key}" for field in self.jagged_fields for key in field.keys)
        return dict(zip(names, lengths.T, strict=True)) | of_fields

    def totals(self, lengths: np.ndarray) -> dict[str, list[int]]:
        """Returns the number of elements per key in rows of these lengths, by name of the jagged field."""
        return {name: lengths[:, keys].sum(0).tolist() for name, keys in self.keys.items()}

    def difference(self, other: Schema) -> str:
        """Returns one line on the first difference between `other` and this schema; "" if there is none."""
        if other is self:
            return ""
        mine, theirs = ({str(field): field for field in schema.fields} for schema in (self, other))
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in theirs or name not in mine:
                return f"field {name!r} is {'missing' if name in mine else 'unexpected'}"
            for attribute in Field.__dataclass_fields__:
                expected, got = getattr(mine[name], attribute), getattr(theirs[name], attribute)
                if expected != got:
                    may_be_padded = attribute == "trailing_shape" and mine[name].is_dense
                    remedy = " (pad in the forward, or to one width)" if may_be_padded else ""
                    return f"field {name!r} has {attribute} {got}, expected {expected}{remedy}"
        in_order = list(mine) == list(theirs)
        return "" if in_order else f"fields are in order {list(theirs)}, expected {list(mine)}"


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor, `[elements]`, so that torch can view them as another dtype.

    A lone element may have any stride, as in `x[:, 0]` of a single row, and torch views only a stride of 1.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def bytes_on_host(tensor: torch.Tensor) -> np.ndarray:
    """Returns a copy of the bytes of a tensor, uint8 `[bytes]`: torch never resizes memory NumPy has seen."""
    return flattened(tensor).cpu().view(torch.uint8).clone().numpy()


def hash_bytes(data: bytes) -> int:
    """Returns a 63-bit hash, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def lengths_of(value: JaggedTensor | KeyedJaggedTensor) -> torch.Tensor:
    """Returns the lengths of a jagged value, without caching them in it if it was built from offsets: they
    would be in unpinned memory, and a copy of the value to the device would wait for them."""
    lengths = value.lengths_or_none()
    return value.offsets().diff() if lengths is None else lengths


def type_name(value: Any) -> str:
    """Returns the name of a value's type, including the module unless the type is a builtin."""
    of = type(value)
    return of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"


def check_leaf(leaf: FieldValue) -> None:
    """Raises a TypeError if a leaf's rows cannot be sent one by one, or something in it would be lost."""
    for part in (leaf, *parts_of(leaf).values()):
        if type(part) not in _EXACT_TYPES:
            plain = next(of for of in _EXACT_TYPES if isinstance(part, of)).__name__
            raise TypeError(
                f"a {type_name(part)} would arrive as a {plain}, without what the subclass adds; make it a "
                f"{plain}, and make what the subclass adds fields of their own"
            )
        if isinstance(part, torch.Tensor):
            _check_tensor(part)
        elif isinstance(part, KeyedJaggedTensor) and part.inverse_indices_or_none() is not None:
            raise TypeError(
                "a KeyedJaggedTensor has inverse_indices, which only refer to rows of this batch; "
                f"{_BUILD_VBE}"
            )


def _check_tensor(part: torch.Tensor) -> None:
    if part.is_nested:
        raise TypeError(
            f"a nested tensor needs layout torch.jagged to be placed row by row, and {MORE_KINDS}"
        )
    if part.is_meta:
        raise TypeError("a tensor is on the device meta, and so has no contents to send; load it on the host")
    if part.layout != torch.strided:
        raise TypeError(f"a tensor has layout {part.layout}, whose rows cannot be sent; make it dense")
    if part.is_quantized or not _is_copied(part.dtype):
        raise TypeError(
            f"a tensor has dtype {part.dtype}, whose rows cannot be sent, because torch {torch.__version__} "
            "does not copy them byte by byte; send quantized values as integers of at least 8 bits "
            "(int_repr) next to their scale, and others as bytes, view(torch.uint8)"
        )


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Returns whether torch copies tensors of a dtype. Versions of torch differ, and none lists its dtypes.
    Without this check, selecting rows would fail later, possibly on one rank only."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except RuntimeError:
        return False
    return True


def num_rows(name: str, value: FieldValue) -> int:
    """Returns the number of rows of a field. Raises a ValueError if it has none, or they are not samples."""
    if isinstance(value, KeyedJaggedTensor):
        if value.variable_stride_per_key():
            raise ValueError(
                f"{name} is a KeyedJaggedTensor with a variable batch size per key (VBE), whose rows are not "
                f"samples; {_BUILD_VBE}"
            )
        if not (value.keys() or value.stride()):
            raise ValueError(
                f"{name} is a KeyedJaggedTensor without keys, which does not tell its number of rows: give "
                "it stride=, or leave it out"
            )
        return value.stride()
    if isinstance(value, JaggedTensor):
        return lengths_of(value).numel()
    if value.dim() == 0:
        raise ValueError(
            f"{name} is a tensor without rows (0-d); give it one row per sample, or declare what all samples "
            f"share: {DECLARE_SHARED}"
        )
    return value.shape[0]


def common_rows(fields: Mapping[str, FieldValue]) -> int:
    """Returns the number of rows of all fields. Raises a ValueError if the fields disagree on it."""
    rows = {name: num_rows(name, value) for name, value in fields.items()}
    jagged = [rows[name] for name, value in fields.items() if not isinstance(value, torch.Tensor)]
    expected = Counter(jagged or rows.values()).most_common(1)[0][0]
    for name in (name for name, count in rows.items() if count != expected):
        raise ValueError(
            f"fields have different numbers of rows: {rows}; each needs one row per sample. {name!r} has "
            f"{rows[name]} and others {expected}. {remedy_for_field(name, fields, expected)}"
        )
    return expected


def remedy_for_field(name: str, fields: Mapping[str, FieldValue], expected: int) -> str:
    """Returns advice for a user whose field `name` does not have `expected` rows."""
    common = "Give it a row per sample, or make it a JaggedTensor if the number of values varies by sample"
    return (
        f"{_fitting_form(name, fields, expected) or common}. If it holds no data of samples, declare so: "
        f"{DECLARE_SHARED}; it then stays with its rank, and never moves"
    )


def _fitting_form(name: str, fields: Mapping[str, FieldValue], expected: int) -> str:
    value = fields[name]
    if not isinstance(value, torch.Tensor):
        return ""
    count = len(value)
    sizes = [len(of if isinstance(of, torch.Tensor) else of.values()) for of in fields.values()]
    for other, field in fields.items():
        if isinstance(field, torch.Tensor):
            if _are_offsets(field, sizes):
                return (
                    f"{other!r} has offsets, which belong to the values that they divide: make both one "
                    "JaggedTensor(values, offsets=...)"
                )
            continue
        if len(field.values()) == count:
            return f"If it has a number for each of {other!r}, make it a JaggedTensor with the same lengths"
        keys = field.keys() if isinstance(field, KeyedJaggedTensor) else []
        totals = lengths_of(field).view(len(keys), -1).sum(1).tolist() if keys else []
        for key in (key for key, total in zip(keys, totals, strict=True) if total == count):
            return (
                f"If it has a number for each element of {key!r} in {other!r}, make it a JaggedTensor "
                "with that key's lengths"
            )
    if value.dim() > 1 and value.shape[1] == expected:
        return "Rows are in its dim 1: transpose(0, 1) puts them first"
    if value.dim() == 1 and count and expected and count % expected == 0:
        each = count // expected
        return f"If it has {each} numbers per sample, view it as [{expected}, {each}]"
    return ""


def _are_offsets(value: torch.Tensor, sizes: list[int]) -> bool:
    """Returns whether numbers divide a field of one of these sizes. Sorted labels and ids look alike."""
    if value.dim() != 1 or len(value) < 2 or value.is_floating_point() or value.dtype == torch.bool:
        return False
    last, divides_few = int(value[-1]), len(value) - 1 in sizes and len(value) - 1 != int(value[-1])
    is_ascending = int(value[0]) == 0 and bool((value.diff() >= 0).all())
    return is_ascending and last in sizes and (last > len(value) or divides_few)


def parts_of(leaf: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors that a leaf has, by name. A tensor is its own "values"."""
    if isinstance(leaf, torch.Tensor):
        return {"values": leaf}
    parts = {"values": leaf.values(), "weights": leaf.weights_or_none()}
    parts |= {"lengths": leaf.lengths_or_none(), "offsets": leaf.offsets_or_none()}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def with_tensors(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor], **more: Any) -> Any:
    """Returns a leaf with `change` applied to its tensors, and a jagged one with `more` arguments."""
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    parts = parts_of(leaf) | {"lengths": lengths_of(leaf)}
    more |= {name: change(part) for name, part in parts.items()}
    if isinstance(leaf, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=leaf.keys(), stride=leaf.stride(), **more)
    return JaggedTensor(**more)


def pinned(leaf: Any) -> Any:
    """Returns a leaf in pinned host memory."""
    if isinstance(leaf, KeyedJaggedTensor):  # keeps what the leaf has cached
        return leaf.pin_memory()
    return with_tensors(leaf, torch.Tensor.pin_memory)


# Batches of a training run share one schema object, and with it all cached properties.
_interned = functools.lru_cache(maxsize=256)(Schema)
