"""The rows of any batch: a `BaseBatch`, a dict, TorchRec's `Batch`, a TensorDict."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.sequence_batch.base_batch import BaseBatch, check_travels, num_rows
from commons.sequence_batch.packed_rows import PackedRows, gather_rows
from commons.sequence_batch.row_schema import FieldValue, RowSchema

Container = TypeVar("Container")
_TORCHREC_FIELDS = ("dense_features", "sparse_features", "labels")


def per_sample_fields(batch: Any) -> dict[Any, FieldValue]:
    """What travels with the samples of a batch, by name, or by the key that the container has it under.

    Of a dict or TensorDict these are all KeyedJaggedTensors, JaggedTensors and tensors in it, with one row
    per sample; a jagged nested tensor counts as a JaggedTensor. Other values of a dict are shared.

    Raises:
        TypeError: the batch is none of those that this module is about, or nothing in it has rows.
    """
    if isinstance(batch, BaseBatch):
        return batch.per_sample_fields()
    if isinstance(batch, TorchRecBatch):
        return {name: getattr(batch, name) for name in _TORCHREC_FIELDS}
    if isinstance(batch, TensorDictBase | MutableMapping):
        fields = {key: as_jagged(value) for key, value in _leaves(batch) if isinstance(value, FieldValue)}
        if fields:
            return fields
    raise TypeError(
        f"{type(batch).__name__} has no rows to place; expected a BaseBatch, a torchrec Batch, or a dict or "
        "TensorDict of KeyedJaggedTensors, JaggedTensors and tensors with one row per sample"
    )


def batch_rows(batch: Any) -> tuple[int, int]:
    """Rows of a batch, and how many of them are samples: all, where it is no `BaseBatch`.

    Raises:
        ValueError: the fields disagree.
    """
    if isinstance(batch, BaseBatch):
        return batch.batch_size, batch.num_samples
    rows = {name: num_rows(name, value) for name, value in per_sample_fields(batch).items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"fields have different numbers of rows: {rows}; each needs one row per sample")
    (of_all,) = set(rows.values())
    return of_all, of_all


def with_rows(
    batch: Container, fields: dict[Any, FieldValue], batch_size: int, num_samples: int
) -> Container:
    """A batch of the same kind as `batch` with other rows; what is no per-sample field stays."""
    made: Any
    if isinstance(batch, BaseBatch):
        made = batch.with_fields(fields, batch_size, num_samples)
    elif isinstance(batch, TorchRecBatch):
        made = dataclasses.replace(batch, **fields)
    elif isinstance(batch, TensorDictBase):
        made = TensorDict({}, batch_size=[batch_size], device=batch.device)
        for key, value in _leaves(batch):
            if key in fields:
                made[key] = like_nested(fields[key], value)
            else:
                made.set_non_tensor(key, value.data)
    elif isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update({key: like_nested(value, batch[key]) for key, value in fields.items()})
    else:
        raise TypeError(f"cannot put rows into a {type(batch).__name__}")
    return made


def num_tokens(batch: Any) -> torch.Tensor:
    """`[batch_size]` int64: tokens of each row; of a batch that does not say, its jagged elements."""
    if isinstance(batch, BaseBatch):
        return batch.num_tokens()
    rows, _ = batch_rows(batch)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device_of(batch))
    for value in per_sample_fields(batch).values():
        if not isinstance(value, torch.Tensor):
            tokens += value.lengths().view(-1, rows).sum(0)
    return tokens


def num_loss_tokens(batch: Any) -> torch.Tensor:
    """`[batch_size]` int64: loss tokens of each row; of a batch that does not say, one."""
    if isinstance(batch, BaseBatch):
        return batch.num_loss_tokens()
    return torch.ones(batch_rows(batch)[0], dtype=torch.int64, device=device_of(batch))


def device_of(batch: Any) -> torch.device:
    """Where a batch's rows are."""
    value = next(iter(per_sample_fields(batch).values()))
    return value.device if isinstance(value, torch.Tensor) else value.values().device


def on_host(batch: Any) -> Any:
    """The batch itself if it is on the host, else a copy, for which it waits."""
    host = torch.device("cpu")
    if device_of(batch) == host:
        return batch
    if isinstance(batch, MutableMapping) and not isinstance(batch, TensorDictBase):
        moved = copy.copy(batch)
        moved.update({key: value.to(host) for key, value in batch.items() if isinstance(value, FieldValue)})
        return moved
    return batch.to(host)


def select_rows(batches: Sequence[Container], rows: np.ndarray, num_elements: Sequence[int]) -> Container:
    """A batch of real rows of several host batches of one schema; one padding row if there are none.

    What their samples share is that of the first.

    Args:
        batches: at least one.
        rows: int64 `[selected]`, positions among all rows of all batches.
        num_elements: elements of each jagged field in the selected rows together.
    """
    sources = []
    for batch in batches:
        fields = per_sample_fields(batch)
        sources.append(PackedRows.pack(fields, RowSchema.of(fields), batch_rows(batch)[0]))
    selected = gather_rows(sources, rows, num_elements).pad_to(max(len(rows), 1))
    return with_rows(batches[0], selected.unpack(), selected.num_rows, len(rows))


def pinned_like(batch: Container, like: Any) -> Container:
    """The batch in pinned memory if `like` is, so that its copy to the device need not wait."""
    value: Any = next(iter(per_sample_fields(like).values()))
    tensor = value if isinstance(value, torch.Tensor) else value.values()
    pin_memory = getattr(batch, "pin_memory", None)
    return pin_memory() if pin_memory is not None and tensor.is_pinned() else batch


def as_jagged(value: Any) -> FieldValue:
    """A jagged nested tensor as a JaggedTensor; any other value as it is.

    Raises:
        TypeError: a nested tensor whose rows are not simply one behind the other.
    """
    if not (isinstance(value, torch.Tensor) and value.is_nested):
        return value
    nested: Any = value
    if value.layout != torch.jagged or nested._ragged_idx != 1 or nested.lengths() is not None:
        raise TypeError(
            "a nested tensor has to have layout torch.jagged, its rows ragged in dim 1 and without holes, to "
            "be placed row by row"
        )
    return JaggedTensor(values=nested.values(), lengths=nested.offsets().diff())


def _leaves(batch: Any) -> list[tuple[Any, Any]]:
    """What a dict or TensorDict holds, by key.

    Raises:
        TypeError: it may hold data of samples that would not move with them.
    """
    if not isinstance(batch, TensorDictBase):
        for key, value in batch.items():
            check_travels(repr(key), value)
        return list(batch.items())
    leaves = list(batch.items(True, True, is_leaf=is_leaf_nontensor))
    for key, value in leaves:
        if isinstance(value, NonTensorStack):
            raise TypeError(
                f"{key!r} has a value for each row that is no tensor and would stay behind when its samples "
                "move; make it a tensor"
            )
    return leaves


def like_nested(value: FieldValue, like: Any) -> FieldValue:
    """A JaggedTensor as a nested tensor if `like` is one; any other value as it is."""
    if isinstance(like, torch.Tensor) and like.is_nested and isinstance(value, JaggedTensor):
        return torch.nested.nested_tensor_from_jagged(value.values(), value.offsets())
    return value
