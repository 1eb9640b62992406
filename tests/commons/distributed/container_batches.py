"""Batches that are no `BaseBatch`, and what belongs to each of their samples."""

import numpy as np
import torch
from tensordict import TensorDict
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler
from tests.drawn_batches import MixedBatch, sample_contents

KINDS = ["dict", "torchrec"]
MORE_KINDS = ["dict with nested tensors", "tensordict"]  # they need the extension `more_kinds`


def _as_nested(lengths: np.ndarray, values: torch.Tensor) -> torch.Tensor:
    offsets = torch.from_numpy(np.append(0, np.cumsum(lengths)))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def make_batch(kind: str, seed: int, first_sample: int, rows: int):
    """Draws a batch in which every value of a sample is its number, and its lengths depend on it alone."""
    samples = np.arange(first_sample, first_sample + rows)
    drawn = [np.random.default_rng((seed, sample)).integers(0, 5, 4) for sample in samples]
    lengths = np.stack(drawn, 1) if rows else np.zeros((4, 0), dtype=np.int64)
    values = [torch.from_numpy(samples.repeat(of_key)) for of_key in lengths]
    keyed = KeyedJaggedTensor(
        ["a", "b"],
        torch.cat(values[:2]),
        weights=torch.cat(values[:2]).float() / 3,
        lengths=torch.from_numpy(lengths[:2].ravel()),
        stride=rows,
    )
    ids = torch.from_numpy(samples)
    dense = torch.stack([ids, -ids], 1).double()
    if kind == "torchrec":
        return TorchRecBatch(dense_features=dense, sparse_features=keyed, labels=ids.float())
    if kind == "tensordict":
        return TensorDict(
            {
                "ids": ids,
                "dense": dense,
                "history": _as_nested(lengths[2], values[2]),
                "user": {"age": ids.int(), "home": {"place": dense.half()}},
            },
            batch_size=[rows],
        )
    nested = {"nested": _as_nested(lengths[3], values[3])} if kind == "dict with nested tensors" else {}
    return {
        "ids": ids,
        "keyed": keyed,
        "jagged": JaggedTensor(values[2].int(), lengths=torch.from_numpy(lengths[2]).int()),
        **nested,
        "dense": dense,
        "name": "train",
        "rate": 0.5,
        "limits": [1, 2],
        "nothing": None,
    }


def contents(batch) -> list[tuple]:
    """Returns everything that belongs to each row, of a `MixedBatch` to each real row, comparable."""
    if isinstance(batch, MixedBatch):
        return sample_contents(batch)
    if isinstance(batch, TorchRecBatch):
        fields = {"dense": batch.dense_features, "keyed": batch.sparse_features, "labels": batch.labels}
    elif isinstance(batch, TensorDict):
        fields = dict(batch.items(include_nested=True, leaves_only=True))
    else:
        fields = batch
    columns = []
    for name, value in fields.items():
        if isinstance(value, KeyedJaggedTensor):
            columns += [(name, _rows_of(value[key])) for key in value.keys()]  # noqa: SIM118
        elif isinstance(value, JaggedTensor):
            columns.append((name, _rows_of(value)))
        elif isinstance(value, torch.Tensor):
            rows = value.unbind() if value.is_nested else value
            columns.append((name, [tuple(row.flatten().tolist()) for row in rows]))
    return [
        tuple((name, row) for (name, _), row in zip(columns, of_sample, strict=True))
        for of_sample in zip(*(rows for _, rows in columns), strict=True)
    ]


def check_shared(moved, batch) -> None:
    """Checks that a batch made from another is of its type, and has what all samples share."""
    assert type(moved) is type(batch)
    if isinstance(batch, MixedBatch):
        assert moved.shared is batch.shared and moved.feature_to_max_seqlen == batch.feature_to_max_seqlen
    elif isinstance(batch, TensorDict):
        assert moved.batch_size == (len(contents(moved)),)
    elif isinstance(batch, dict):
        assert list(moved) == list(batch)
        assert all(moved[name] is batch[name] for name in ("name", "rate", "limits", "nothing"))


def _rows_of(jagged: JaggedTensor) -> list[tuple]:
    parts = [jagged.values(), *([] if jagged.weights_or_none() is None else [jagged.weights()])]
    lengths = jagged.lengths().tolist()
    return list(zip(*([tuple(row.tolist()) for row in part.split(lengths)] for part in parts), strict=True))


class ContainerShuffler(BatchShuffler):
    """Long histories cost more. Remembers the batches that it was asked about."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.asked_about = []

    def get_workloads(self, batch):
        self.asked_about.append(batch)
        if isinstance(batch, TorchRecBatch):
            lengths = batch.sparse_features.lengths().view(2, -1).sum(0)
        elif isinstance(batch, TensorDict):
            lengths = batch["history"].offsets().diff()
        else:
            lengths = batch["jagged"].lengths()
        return lengths.long() ** 2
