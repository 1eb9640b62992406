"""The base class of the library's own batches: jagged features, labels, and a count of real rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from .fields import DECLARE_SHARED, FieldValue, Schema, lengths_of, num_rows, pinned, remedy_for_field
from .packed_rows import PackedRows, checked_lengths, jagged_parts, read_lengths, read_together, select_rows
from .tree import Part, is_list, is_rebuilding, move_to, take_apart, transform


@dataclass(eq=False)
class BaseBatch(Pipelineable):
    """A batch of `batch_size` rows, of which the first `actual_batch_size` are samples and the rest padding.

    A model's batch subclasses `BaseBatch` and adds dataclass fields. Every tensor, JaggedTensor, and
    KeyedJaggedTensor in a field, at any depth of dicts, lists and dataclasses, must have one row for each row
    of the batch. A shuffle moves each row with its sample. Mark fields that all samples
    share with `field(metadata={"per_sample": False})`. Plain values, such as numbers and names, are shared.

    Attributes:
        features: ids of the sparse features, `batch_size` rows per key.
        batch_size: number of rows, padding rows included; at least 1.
        feature_to_max_seqlen: maximum sequence length of each feature, by name.
        contextual_feature_names: names of the features that describe the user rather than the history.
        labels: a jagged tensor, a tensor with `batch_size` rows along dim 0, or a flat tensor that reshapes
            to `[batch_size, -1]`. Padding rows need labels too, usually zeros. Prefer `[batch_size, tasks]`,
            because a flat tensor can be ambiguous.
        actual_batch_size: number of real rows. None means `batch_size`.

    Raises:
        ValueError: a size is out of range, a field does not have `batch_size` rows, a KeyedJaggedTensor has a
            variable batch size per key, or flat labels may cover only the real rows.
        TypeError: a field holds a NumPy array, or anything else that would not travel with its samples.
    """

    # Attributes that the exchange sets for the rows it delivers. They are not fields.
    set_by_exchange: ClassVar[tuple[str, ...]] = ("_counts_on_host", "pieces")

    features: KeyedJaggedTensor
    batch_size: int
    feature_to_max_seqlen: dict[str, int] = field(metadata={"per_sample": False})
    contextual_feature_names: list[str] = field(default_factory=list, metadata={"per_sample": False})
    labels: KeyedJaggedTensor | torch.Tensor | None = None
    actual_batch_size: int | None = None

    def __post_init__(self) -> None:
        self._counts_on_host: Mapping[str, np.ndarray] | None = None
        self.pieces: Any = None
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; a batch has at least one row")
        if self.actual_batch_size is None:
            self.actual_batch_size = self.batch_size
        if not 0 <= self.actual_batch_size <= self.batch_size:
            raise ValueError(
                f"actual_batch_size is {self.actual_batch_size}; expected 0 to batch_size = {self.batch_size}"
            )
        if not is_rebuilding.get():
            self._check_flat_labels(self.actual_batch_size)
            self.check_rows(self.per_sample_fields())

    def check_rows(self, fields: Mapping[str, FieldValue]) -> None:
        """Raises a ValueError if a field from `per_sample_fields` does not have `batch_size` rows."""
        for name, value in fields.items():
            rows = num_rows(name, value)
            if rows != self.batch_size:
                raise ValueError(
                    f"{type(self).__name__}.{name} has {rows} rows, expected batch_size = {self.batch_size}. "
                    f"{remedy_for_field(name, fields, self.batch_size)}"
                )

    @property
    def num_samples(self) -> int:
        """The number of real rows."""
        return self.batch_size if self.actual_batch_size is None else self.actual_batch_size

    def per_sample_fields(self, tree: Part | None = None) -> dict[str, FieldValue]:
        """Returns the fields with one row per sample, by path. Flat labels become `[batch_size, -1]`.

        `tree` is this batch, taken apart. None means that it is taken apart here.
        """
        try:
            per_sample = (tree or take_apart(self)).fields()
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.{error}") from error
        labels = per_sample.get("labels")
        if isinstance(labels, torch.Tensor) and labels.dim() == 1 and len(labels) != self.batch_size:
            is_flat = len(labels) % self.batch_size == 0
            per_sample["labels"] = labels.view(self.batch_size, -1) if is_flat else labels
        return per_sample

    def index_select(self, indices: torch.Tensor | Sequence[int]) -> Self:
        """Returns a batch of the given rows, in the given order. Rows may be repeated or left out.

        Padding rows may be selected, but only after all real rows. An empty selection returns one padding
        row. On CUDA this synchronizes host and device.

        Raises:
            TypeError: `indices` are not a flat sequence of integers, as in a mask; or a list that is not
                declared as shared has an entry for each row, or for each sample.
            ValueError: an index is out of range, a padding row precedes a real row, the lengths of a jagged
                field do not match its values, or the rows are pieces of samples.
        """
        if self.pieces is not None:
            raise ValueError(
                "index_select got a batch with pieces of samples, which need all rows of their step; select "
                "rows before the exchange"
            )
        given = torch.as_tensor(indices, device="cpu")
        if given.dim() != 1 or (given.numel() and (given.is_floating_point() or given.dtype == torch.bool)):
            raise TypeError(
                f"index_select got {given.dtype} of {tuple(given.shape)}; expected a list of row numbers"
            )
        rows = given.long().numpy()
        if ((rows < 0) | (rows >= self.batch_size)).any():
            raise ValueError(
                f"index_select got row indices from {rows.min()} to {rows.max()}, "
                f"expected 0 to {self.batch_size - 1}"
            )
        is_real = rows < self.num_samples
        num_real, out_rows = int(is_real.sum()), max(len(rows), 1)
        if not is_real[:num_real].all():
            raise ValueError("index_select got a padding row before a real row; real rows come first")
        tree = take_apart(self)
        for path, fact in tree.facts().items():
            if is_list(fact) and len(fact) in (self.batch_size, self.num_samples):
                raise TypeError(
                    f"index_select got {path}, a list with an entry for each row, and selects only tensors: "
                    f"make it a tensor, or declare what all samples share: {DECLARE_SHARED}"
                )
        fields = self.per_sample_fields(tree)
        schema = Schema.of(fields)
        packed = PackedRows.pack(fields, schema, read_lengths(fields, schema, self.batch_size))
        sizes = {"batch_size": out_rows, "actual_batch_size": num_real}
        return tree.rebuilt({**select_rows([packed], rows, out_rows), **sizes})

    def num_tokens(self) -> torch.Tensor:
        """Returns the number of sparse-feature ids to look up for each row, `[batch_size]` int64."""
        return lengths_of(self.features).view(-1, self.batch_size).sum(0, dtype=torch.int64)

    def num_loss_tokens(self) -> torch.Tensor:
        """Returns the number of label elements of each row that enter the loss, `[batch_size]` int64.

        Padding rows have none. Without labels, each sample counts as one loss token.
        """
        has_labels = isinstance(self.labels, FieldValue | KeyedTensor)
        labels = next(iter(take_apart(self.labels).fields().values())) if has_labels else None
        if labels is None:
            tokens = torch.ones(self.batch_size, dtype=torch.int64, device=self.features.device())
        elif isinstance(labels, torch.Tensor):
            per_row = labels.numel() // self.batch_size
            tokens = torch.full((self.batch_size,), per_row, dtype=torch.int64, device=labels.device)
        else:
            tokens = lengths_of(labels).view(-1, self.batch_size).sum(0, dtype=torch.int64)
        tokens[self.num_samples :] = 0
        return tokens

    def row_counts(self) -> dict[str, torch.Tensor]:
        """Returns numbers per row that the model needs on the host besides the lengths of fields, by name.

        Each is a tensor of `[batch_size]` non-negative integers, which planning gathers, so that a model can
        size tensors by them without reading from the device. The default is none.
        """
        return {}

    def row_counts_on_host(self) -> Mapping[str, np.ndarray]:
        """Returns the lengths of jagged fields and the `row_counts`, by name, int64 `[batch_size]` each.

        Lengths are named by field and key, as in "features.item", or by field, as in "labels", for all keys
        together. Padding rows have 0. An exchanged batch has these arrays from its plan. Any other batch
        synchronizes host and device once.
        """
        if self._counts_on_host is not None:
            return self._counts_on_host
        fields, counts = self.per_sample_fields(), self.row_counts()
        schema = Schema.of(fields)
        parts = jagged_parts(fields, schema)
        on_host = read_together([*parts, *counts.values()])
        lengths = checked_lengths(fields, schema, self.batch_size, on_host[: len(parts)])
        named = schema.by_name(lengths) | dict(zip(counts, on_host[len(parts) :], strict=True))
        is_real = np.arange(self.batch_size) < self.num_samples
        return {name: of_rows * is_real for name, of_rows in named.items()}

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns this batch with every tensor on `device`."""
        return self._as_exchanged(move_to(self, device, non_blocking))

    def pin_memory(self) -> Self:
        """Returns this batch with every tensor in pinned host memory."""
        return self._as_exchanged(transform(self, pinned))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses this batch's tensors."""
        for part in take_apart(self).each():
            if part.is_leaf:
                part.value.record_stream(stream)

    def _as_exchanged(self, moved: Self) -> Self:
        moved.pieces, moved._counts_on_host = self.pieces, self._counts_on_host
        return moved

    def _check_flat_labels(self, real: int) -> None:
        """Raises a ValueError if flat labels may cover only the real rows, and so reach the wrong samples.

        Padding rows are labeled 0, or all with one negative number that the loss ignores. Any other numbers
        there may be labels of samples. Labels on a device are not read, because that would synchronize.
        """
        labels = self.labels
        if not isinstance(labels, torch.Tensor) or labels.dim() != 1 or not labels.numel():
            return
        if not 0 < real < self.batch_size:
            return
        of_all, of_real = labels.numel() % self.batch_size == 0, labels.numel() % real == 0
        if of_all and of_real and labels.device.type == "cpu":
            of_padding = labels.view(self.batch_size, -1)[real:]
            of_all = bool((of_padding == of_padding.min().clamp(max=0)).all())
        if of_real and not of_all:
            raise ValueError(
                f"{type(self).__name__}.labels has {labels.numel()} elements in one dimension, which may be "
                f"those of the {real} samples without the {self.batch_size - real} padding rows; give labels "
                f"of shape [rows, tasks], as in labels.view({real}, -1), followed by zeros for padding rows: "
                f"[{self.batch_size}, {labels.numel() // real}]"
            )
