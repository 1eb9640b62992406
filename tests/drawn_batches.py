"""Random batches with every kind of field, whose samples can be told apart."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.sequence_batch import BaseBatch
from tests.commons.sequence_batch.internals import FieldValue, take_apart


@dataclass
class MixedBatch(BaseBatch):
    weighted: KeyedJaggedTensor | None = None
    jagged: JaggedTensor | None = None
    small: torch.Tensor | None = None
    matrix: torch.Tensor | None = None
    flags: torch.Tensor | None = None
    workload: torch.Tensor | None = None
    shared: torch.Tensor | None = field(default=None, metadata={"per_sample": False})


def draw_batch(
    rng: np.random.Generator, first_sample: int, batch_size: int, num_real: int, labels: str = "keyed"
) -> MixedBatch:
    """Draws a batch in which every value of sample s depends on s, so no two samples can be confused.

    `labels` is "keyed", "dense", "flat" or "none". A third of the workloads are 0, always including the last.
    """
    samples = np.arange(first_sample, first_sample + num_real)

    def lengths(keys: int, high: int) -> torch.Tensor:
        drawn = torch.zeros(keys, batch_size, dtype=torch.int64)
        drawn[:, :num_real] = torch.from_numpy(rng.integers(0, high, (keys, num_real)))
        return drawn

    def values(of: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        owner = np.repeat(np.tile(np.arange(batch_size) + first_sample, of.shape[0]), of.flatten().numpy())
        inner = np.arange(len(owner)) % 7
        return torch.from_numpy(owner * 10 + inner).to(dtype)

    def dense(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        tensor = torch.zeros(batch_size, *shape, dtype=dtype)
        tensor[:num_real] = torch.from_numpy(samples).to(dtype).view(-1, *[1] * len(shape)).expand(-1, *shape)
        return tensor

    features, weighted, jagged = lengths(3, 5), lengths(2, 4), lengths(1, 3)
    workload = dense(torch.int64)
    workload[:num_real] = torch.from_numpy(rng.integers(0, 100, num_real) * rng.integers(0, 3, num_real))
    if num_real:
        workload[num_real - 1] = 0
    label_lengths = lengths(1, 3)
    label_values = {
        "keyed": KeyedJaggedTensor(
            ["label"], values(label_lengths, torch.int64), lengths=label_lengths.view(-1)
        ),
        "dense": dense(torch.float32, 2),
        "flat": dense(torch.int64, 3).flatten(),
        "none": None,
    }
    return MixedBatch(
        features=KeyedJaggedTensor(
            ["a", "b", "c"], values(features, torch.int64), lengths=features.view(-1).int()
        ),
        batch_size=batch_size,
        actual_batch_size=num_real,
        feature_to_max_seqlen={"a": 5},
        labels=label_values[labels],
        weighted=KeyedJaggedTensor(
            ["x", "y"],
            values(weighted, torch.int32),
            lengths=weighted.view(-1),
            weights=values(weighted, torch.float64),
        ),
        jagged=JaggedTensor(values(jagged, torch.float32)[:, None].expand(-1, 3), lengths=jagged.view(-1)),
        small=dense(torch.float16),
        matrix=dense(torch.float64, 2, 3),
        flags=dense(torch.uint8, 5),
        workload=workload,
        shared=torch.tensor([1.0, 2.0]),
    )


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Returns every tensor of a batch of any type that travels with its samples."""
    tensors = []
    travel = (
        part for part in take_apart(batch).each() if not part.is_shared and isinstance(part.value, FieldValue)
    )
    for leaf in (part.value for part in travel):
        if isinstance(leaf, JaggedTensor | KeyedJaggedTensor):
            parts = (leaf.values(), leaf.lengths(), leaf.weights_or_none())
            tensors += [part for part in parts if part is not None]
        elif isinstance(leaf, torch.Tensor) and leaf.is_nested:
            tensors += [leaf.values(), leaf.offsets()]
        else:
            tensors.append(leaf)
    return tensors


def sample_contents(batch: MixedBatch) -> list[tuple]:
    """Returns everything that belongs to each real row, in a form that can be compared."""
    names = ("small", "matrix", "flags", "workload")
    columns: dict[str, Any] = {name: getattr(batch, name) for name in names}
    jagged = {"jagged": batch.jagged}
    for name in ("features", "weighted", "labels"):
        field = getattr(batch, name)
        if isinstance(field, KeyedJaggedTensor):
            jagged |= {f"{name}.{key}": column for key, column in field.to_dict().items()}
        elif field is not None:
            columns[name] = field.reshape(batch.batch_size, -1)
    for name, column in jagged.items():
        columns[name] = column.to_dense()
        if column.weights_or_none() is not None:
            columns[f"{name}.weights"] = column.to_dense_weights()
    return [
        tuple((name, tuple(rows[row].flatten().tolist())) for name, rows in columns.items())
        for row in range(batch.num_samples)
    ]
