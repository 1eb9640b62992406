"""Adds kinds to what a batch may hold, on import: `import workload_balancer.extensions.more_kinds`.

- A KeyedTensor is a container of one tensor. Ranks must agree on its keys, which are part of the tensor's
  path: `dense['price: 1, age: 2']`.
- A jagged nested tensor is a container of one JaggedTensor, `history.rows`, without holes between rows.
- A TensorDict is a container, whose values that are not tensors stay with their rank, as in a dict. A
  tensorclass has to be registered by `register_batch_type`.
- A MemoryMappedTensor is a container of one tensor, and arrives in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.nested._internal.nested_tensor import NestedTensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ..sequence_batch import register_batch_type

Parts = Mapping[Any, Any]


def _of_keyed(keyed: KeyedTensor) -> Parts:
    if keyed.key_dim() != 1:
        raise TypeError(f"a KeyedTensor has key_dim {keyed.key_dim()}; expected 1, so that dim 0 is rows")
    widths = zip(keyed.keys(), keyed.length_per_key(), strict=True)
    return {", ".join(f"{key}: {width}" for key, width in widths): keyed.values()}


def _of_nested(nested: Any) -> Parts:
    if nested.lengths() is not None:
        raise TypeError(
            "a nested tensor needs rows without holes to be placed row by row: rebuild it with "
            "torch.nested.nested_tensor(list(rows), layout=torch.jagged)"
        )
    values = nested.values().movedim(nested._ragged_idx - 1, 0)
    offsets = nested.offsets()  # kept, so that `record_stream` covers them, too
    name = "rows" if nested._ragged_idx == 1 else f"rows, ragged in dim {nested._ragged_idx}"
    return {name: JaggedTensor(values=values, lengths=offsets.diff(), offsets=offsets)}


def _replace_nested(nested: Any, parts: Parts) -> Any:
    (jagged,), dim = parts.values(), nested._ragged_idx
    values = jagged.values().movedim(0, dim - 1)
    return torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), jagged_dim=dim)


def _of_tensordict(value: TensorDictBase) -> Parts:
    of_keys = {key: value.get(key) for key in value.keys()}  # noqa: SIM118  iterating it yields rows
    return {key: part.data if isinstance(part, NonTensorData) else part for key, part in of_keys.items()}


def _replace_tensordict(value: TensorDictBase, parts: Parts) -> TensorDict:
    changed = [part for part in parts.values() if _has_batch_size(part)]
    batch_size, device = list(value.batch_size), value.device
    if changed:
        batch_size[:1] = changed[0].shape[: len(batch_size[:1])]
        device = device and changed[0].device
    made = TensorDict({}, batch_size=batch_size, device=device, names=value.names if batch_size else None)
    for key, part in (dict(_of_tensordict(value)) | dict(parts)).items():
        if _has_batch_size(part) or isinstance(part, NonTensorStack):
            made.set(key, part)
        else:
            made.set_non_tensor(key, part)
    return made.lock_() if value.is_locked else made


def _has_batch_size(part: Any) -> bool:
    is_tensor = isinstance(part, torch.Tensor) or isinstance(getattr(part, "batch_size", None), torch.Size)
    return is_tensor and not isinstance(part, NonTensorStack)


def _of_stack(stack: NonTensorStack) -> Parts:
    """Returns an array with an object for each row, which the controller moves and the exchange refuses."""
    return {"entries": np.fromiter(stack.tolist(), object, len(stack))}


register_batch_type(
    KeyedTensor,
    _of_keyed,
    lambda keyed, parts: KeyedTensor(keyed.keys(), keyed.length_per_key(), *parts.values()),
)
register_batch_type(NestedTensor, _of_nested, _replace_nested)
register_batch_type(TensorDictBase, _of_tensordict, _replace_tensordict)
register_batch_type(NonTensorStack, _of_stack, lambda stack, parts: NonTensorStack(*parts["entries"]))
register_batch_type(
    MemoryMappedTensor,
    lambda mapped: {"values": mapped.as_subclass(torch.Tensor)},
    lambda mapped, parts: parts["values"],
)
