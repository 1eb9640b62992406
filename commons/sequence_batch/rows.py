"""The rows of any batch: a `BaseBatch`, or any container of tensors with one row per sample."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .base_batch import BaseBatch
from .fields import (
    MORE_KINDS,
    FieldValue,
    Schema,
    bytes_on_host,
    common_rows,
    hash_bytes,
    lengths_of,
    parts_of,
    pinned,
    type_name,
    with_tensors,
)
from .packed_rows import PackedRows, read_lengths, select_rows
from .tree import Part, container_of, take_apart

# Integer types in which squares and FLOPs of lengths overflow.
NARROW_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)


class Rows:
    """The rows of a batch, which is taken apart once and rebuilt from other rows on demand.

    All samples share the parts at the paths in `shared`, such as "context.temperature" or "[2]". Methods that
    return rows with other `fields` keep the `tree` of the given batch as a pattern, from which `batch` is
    rebuilt when first read. Only a `BaseBatch` can mark rows as padding, which `pads` tells.
    """

    def __init__(self, batch: Any, shared: Collection[str] = ()) -> None:
        self.batch, self._shared, self.pads = batch, shared, isinstance(batch, BaseBatch)

    @cached_property
    def tree(self) -> Part:
        """The batch, taken apart."""
        return take_apart(self.batch, self._shared)

    @cached_property
    def fields(self) -> dict[str, FieldValue]:
        """The fields that travel with the samples, by path.

        Raises:
            TypeError: nothing in the batch has rows, or something would stay behind when samples move.
        """
        if fields := self.tensor_fields():
            return fields
        raise TypeError(
            f"{type_name(self.batch)} has no rows to place; expected a BaseBatch, or tensors, JaggedTensors "
            "and KeyedJaggedTensors with one row per sample, in any nesting of dataclasses, dicts, lists and "
            f"(named) tuples. Of other types, {MORE_KINDS}"
        )

    def tensor_fields(self) -> dict[str, FieldValue]:
        """Returns the fields that are tensors or jagged tensors, by path."""
        return self.batch.per_sample_fields(self.tree) if self.pads else self.tree.fields()

    @cached_property
    def shared_leaves(self) -> dict[str, Any]:
        """The tensors that all samples share, by path."""
        leaves = (part for part in self.tree.each() if part.is_shared and part.is_leaf)
        return {part.path: part.value for part in leaves}

    @cached_property
    def num_rows(self) -> int:
        """The number of rows of the batch. If its fields disagree on it, this raises a ValueError."""
        if self.pads:
            self.batch.check_rows(self.fields)  # the batch may have changed since it was made
            return self.batch.batch_size
        return common_rows(self.fields)

    @cached_property
    def num_samples(self) -> int:
        """The number of rows that are samples. They precede all padding rows."""
        return self.batch.num_samples if self.pads else self.num_rows

    @property
    def schema(self) -> Schema:
        """The schema of the fields."""
        return Schema.of(self.fields)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._any_tensor.device

    @property
    def is_pinned(self) -> bool:
        """Whether the rows are in pinned memory."""
        return self._any_tensor.is_pinned()

    @property
    def _any_tensor(self) -> torch.Tensor:
        return parts_of(next(iter(self.fields.values())))["values"]

    def view(self, batch: Any) -> Rows:
        """Returns the rows of another batch of the same kind."""
        return type(self)(batch, self._shared)

    def packed(self, lengths: np.ndarray | None = None) -> PackedRows:
        """Returns all rows as words. Without `lengths`, int64 `[rows, keys]`, the host waits to read them."""
        if lengths is None:
            lengths = read_lengths(self.fields, self.schema, self.num_rows)
        return PackedRows.pack(self.fields, self.schema, lengths)

    def replaced(self, fields: dict[str, FieldValue], num_rows: int, num_samples: int) -> Self:
        """Returns rows with these fields, from which `batch` rebuilds a batch of the same kind."""
        pattern, made = self.tree, copy.copy(self)
        vars(made).pop("batch", None)  # a cached property, as are those that are set here
        made.tree, made.fields, made.num_rows, made.num_samples = pattern, fields, num_rows, num_samples
        return made

    @cached_property
    def batch(self) -> Any:
        """The batch of these rows."""
        sizes = {"batch_size": self.num_rows, "actual_batch_size": self.num_samples} if self.pads else {}
        return self.tree.rebuilt({**self.fields, **self.shared_leaves, **self.others(), **sizes})

    def others(self) -> dict[str, Any]:
        """Returns other parts that move with the rows, by path. This class has none."""
        return {}

    def select(self, sources: Sequence[PackedRows], positions: np.ndarray, num_rows: int) -> Any:
        """Returns a batch of the same kind with the rows that `select_rows` copies."""
        fields = select_rows(sources, positions, num_rows)
        return self.replaced(fields, num_rows, len(positions)).batch

    def with_counts(self, counts: Mapping[str, np.ndarray]) -> Self:
        """Returns the rows with a batch that holds these `row_counts_on_host` of its samples, int64
        `[samples]` each. Only a `BaseBatch` holds any."""
        if not self.pads:
            return self
        made = copy.copy(self)
        made.batch = copy.copy(self.batch)
        padded = {name: np.pad(of, (0, self.num_rows - len(of))) for name, of in counts.items()}
        made.batch._counts_on_host = padded
        return made

    def with_totals(self, lengths: np.ndarray) -> Self:
        """Returns the rows with the total of each key's `lengths`, int64 `[rows, keys]`, which TorchRec would
        read from the device."""
        totals, fields = self.schema.totals(lengths), dict(self.fields)
        for name, value in self.fields.items():
            if isinstance(value, KeyedJaggedTensor):
                fields[name] = with_tensors(value, lambda tensor: tensor, length_per_key=totals[name])
        return self.replaced(fields, self.num_rows, self.num_samples)

    def copy(self) -> Self:
        """Returns a copy of the rows in memory of its own, without synchronizing host and device."""
        fields = {name: with_tensors(value, torch.Tensor.clone) for name, value in self.fields.items()}
        return self.replaced(fields, self.num_rows, self.num_samples)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the rows, and the tensors that all samples share, on `device`."""
        return self._moved(lambda leaf: leaf.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns the rows, and the tensors that all samples share, in pinned host memory."""
        return self._moved(pinned)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses the rows, and the tensors that all samples share."""
        for leaf in (*self.fields.values(), *self.shared_leaves.values()):
            leaf.record_stream(stream)

    def _moved(self, move: Callable[[Any], Any]) -> Self:
        fields = {name: move(field) for name, field in self.fields.items()}
        moved = self.replaced(fields, self.num_rows, self.num_samples)
        moved.shared_leaves = {path: move(leaf) for path, leaf in self.shared_leaves.items()}
        return moved

    def on_host(self) -> Self:
        """Returns these rows if they are on the host, or else a copy, for which the host waits."""
        return self if self.device.type == "cpu" else self.to(torch.device("cpu"))

    def to_count(self) -> Rows:
        """Returns rows to count costs from, in which squares of integers do not overflow.

        Lengths are int64, as are integers in one or two dimensions. All objects are new, so that the loaded
        batch gets no cached offsets and no added items. Tensors that stay as they are share its memory.
        """
        shown = {path: with_tensors(value, _widened) for path, value in self.fields.items()}
        return self.replaced(shown, self.num_rows, self.num_samples)

    def num_tokens(self) -> torch.Tensor:
        """Returns the tokens of each row, `[rows]` int64: those of a `BaseBatch`, or else all elements."""
        if self.pads:
            return self.batch.num_tokens()
        tokens = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        for value in self.fields.values():
            if not isinstance(value, torch.Tensor):
                tokens += lengths_of(value).view(-1, self.num_rows).sum(0)
        return tokens

    def num_loss_tokens(self) -> torch.Tensor:
        """Returns the loss tokens of each row, `[rows]` int64: those of a `BaseBatch`, or else one each."""
        if self.pads:
            return self.batch.num_loss_tokens()
        return torch.ones(self.num_rows, dtype=torch.int64, device=self.device)

    def facts(self) -> dict[str, Any]:
        """Returns the plain values that are not declared as shared, by path, without the numbers of rows."""
        return self._without_counts(self.tree.facts() | self.tree.facts_in_attributes())

    def hash_of_rest(self) -> int:
        """Returns a hash of all data that does not travel with the rows, without the numbers of rows."""
        rest = {part.path: part.value for part in self.tree.each() if not (part.is_leaf or part.parts)}
        plain = self._without_counts(rest | self.tree.facts_in_attributes())
        hashes = hashes_of(plain | self.shared_leaves)
        return hash_bytes(repr(sorted(hashes.items())).encode())

    def _without_counts(self, facts: dict[str, Any]) -> dict[str, Any]:
        counts = ("batch_size", "actual_batch_size") if self.pads else ()
        return {path: value for path, value in facts.items() if path not in counts}

    def check(self) -> None:
        """Raises an error if the batch cannot be rebuilt from other rows, or has not all shared paths.

        It is a ValueError for shared paths, which a `BaseBatch` cannot have, and a TypeError for parts.
        """
        if self._shared and self.pads:
            raise ValueError(
                f"shared_fields names {sorted(self._shared)}, and {type_name(self.batch)} is a BaseBatch: "
                'mark what its samples share with field(metadata={"per_sample": False})'
            )
        known = {part.path for part in self.tree.each()} - {""} if self._shared else set()
        for path in sorted(set(self._shared) - known):
            raise ValueError(
                f"shared_fields names {path!r}, which is not in the batch; there are {sorted(known)}"
            )
        for part in self.tree.each():
            if part.path and isinstance(part.value, BaseBatch) and not part.is_shared:
                raise TypeError(
                    f"{part.path} is a {type_name(part.value)} within a {type_name(self.batch)}, which would "
                    "keep the numbers of rows that were loaded: make the whole a BaseBatch with fields of "
                    "its own, or the part another dataclass"
                )
        names = {spec.name for spec in dataclasses.fields(self.batch)} if self.pads else set()
        for name in names.intersection(getattr(type(self.batch), "set_by_exchange", ())):
            raise TypeError(
                f"{type_name(self.batch)} has a field {name!r}, which the exchange sets: rename it"
            )
        self.tree.check_no_samples(self.num_rows)
        self.tree.check_replaceable()


def _widened(numbers: torch.Tensor) -> torch.Tensor:
    is_narrow = numbers.dtype in NARROW_INTEGERS and numbers.dim() <= 2
    return numbers.long() if is_narrow else numbers.view_as(numbers)


def hashes_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns a 63-bit hash of each plain value, and of the contents of each leaf, by path. It is the same in
    every process. Leaves of some layouts have none."""
    found = {}
    for path, value in values.items():
        if not isinstance(value, FieldValue):
            found[path] = hash_bytes(_text(value).encode())
            continue
        with suppress(TypeError, RuntimeError):
            parts = parts_of(value)
            if not isinstance(value, torch.Tensor):
                parts.pop("offsets", None)  # ranks may differ in which of the two they have cached
                parts["lengths"] = lengths_of(value).long()
            formats = repr([(tuple(part.shape), part.dtype) for part in parts.values()])
            contents = (bytes_on_host(part).tobytes() for part in parts.values())
            found[path] = hash_bytes(b"".join([formats.encode(), *contents]))
    return found


def _text(value: Any) -> str:
    """Returns a text of plain values that depends on neither memory addresses nor the order of a set."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, range):
        return repr(list(value))
    if isinstance(value, np.ndarray) and value.dtype != object:  # whose text may leave out numbers
        return f"{value.dtype} {value.shape} {value.tobytes()!r}"
    if type(value).__repr__ is object.__repr__:  # which shows the address
        return type_name(value)
    container = container_of(type(value))  # type: ignore[arg-type]
    if container is None:
        return repr(value)
    return f"[{', '.join(f'{key!r}: {_text(part)}' for key, part in container.parts(value).items())}]"
