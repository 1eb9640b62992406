"""Batches as ranks load them, outputs that a model may compute, and a bitwise comparison."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.commons.distributed.internals import EXCHANGE_NAMES
from tests.drawn_batches import draw_batch

BOTH = sorted(EXCHANGE_NAMES)
# Collectives in which they move samples.
PAYLOAD = {"all_gather": "all_gather_into_tensor", "all_to_all": "all_to_all_single"}


def check_identical(got: Any, expected: Any, where: str = "batch") -> None:
    """Checks that both are the same, bit for bit: -0.0 is not 0.0, and NaNs are equal if their bits are."""
    assert type(got) is type(expected), where
    parts = _parts_of(expected)
    if parts is not None:
        of_got = _parts_of(got)
        assert list(of_got) == list(parts), where
        for name, part in parts.items():
            check_identical(of_got[name], part, f"{where}.{name}")
    elif isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        assert _bytes(got) == _bytes(expected), where
    else:
        assert got == expected, where


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Returns what a container or a jagged value consists of; None if it is neither."""
    if isinstance(value, TensorDictBase):
        return {"batch_size": value.batch_size, **dict(value.items(True, True))}
    if isinstance(value, KeyedTensor):
        return {"keys": value.keys(), "widths": value.length_per_key(), "values": value.values()}
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):
        parts = {name: getattr(value, name)() for name in ("lengths", "values", "weights_or_none")}
        is_keyed = isinstance(value, KeyedJaggedTensor)
        return parts | ({"keys": value.keys(), "stride": value.stride()} if is_keyed else {})
    if isinstance(value, torch.Tensor) and value.is_nested:
        return {"ragged": value._ragged_idx, "offsets": value.offsets(), "values": value.values()}
    if isinstance(value, TorchRecBatch):
        return vars(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        is_plain = not hasattr(value, "__dict__")
        return dict(value) if is_plain else {"entries": dict(value), "attributes": dict(vars(value))}
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.cpu().resolve_conj().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def agreed(shuffler, labels="keyed"):
    """Runs a first step, in which ranks agree on the fields; later steps are like any other."""
    shuffler.shuffle(draw_batch(np.random.default_rng(0), 0, 1, 1, labels))
    return shuffler


def lopsided_batch():
    """Draws four samples, which are heavier on rank 0."""
    rank = dist.get_rank()
    batch = draw_batch(np.random.default_rng(rank), 1000 * (rank + 1), 4, 4)
    batch.workload = torch.arange(4) + 100 * (rank == 0)
    return batch


def many_fields(seed: int) -> dict:
    """Draws jagged fields of many dtypes, two with weights, and dense ones; rank 1 has the long rows."""
    rank = dist.get_rank()
    rng = np.random.default_rng((seed, rank))

    def keyed(keys: list[str], dtype: torch.dtype, weights: torch.dtype | None = None) -> KeyedJaggedTensor:
        lengths = torch.from_numpy(rng.integers(0, 5, len(keys) * 6))
        values = torch.from_numpy(rng.integers(0, 100, int(lengths.sum()))).to(dtype)
        return KeyedJaggedTensor(
            keys, values, lengths=lengths, weights=None if weights is None else values.to(weights)
        )

    return {
        "ids": keyed(["a", "b", "c"], torch.int64),
        "times": keyed(["t"], torch.float32, torch.float64),
        "jagged": JaggedTensor(torch.arange(9), lengths=torch.tensor([1, 0, 2, 3, 0, 3])),
        "floats": JaggedTensor(torch.arange(8.0), lengths=torch.tensor([1, 0, 3, 2, 1, 1])),
        "codes": keyed(["d", "e"], torch.int16, torch.float16),
        "workload": torch.from_numpy(rng.integers(1, 100, 6) * (1 + 100 * rank)),
        "price": torch.rand(6, 3, dtype=torch.float64),
        "flag": torch.rand(6) > 0.5,
        "embedding": torch.rand(6, 2, 2).bfloat16(),
    }


def sample_ids(batch) -> list[int]:
    return batch.matrix[: batch.num_samples, 0, 0].long().tolist()


def model_outputs(batch, padded: bool) -> dict:
    """Makes what a model may compute for a batch; only if `padded`, it has padding rows, too."""
    return outputs_of(sample_ids(batch), batch.batch_size - batch.num_samples if padded else 0, junk=True)


def expected_outputs(batch) -> dict:
    """Makes those outputs as they come back for a loaded batch, whose padding rows are empty."""
    return outputs_of(sample_ids(batch), batch.batch_size - batch.num_samples)


def outputs_of(ids: list[int], num_padding: int, junk: bool = False) -> dict:
    """Makes what a model may compute for samples by their numbers, and padding; with `junk` it has values."""
    rows = [_output_of_one(sample) for sample in ids]
    rows += [_output_of_one(-1 if junk else None)] * num_padding

    keyed = [torch.cat([row["keyed"][key] for row in rows] or [torch.zeros(0)]) for key in range(2)]
    keyed_lengths = [torch.tensor([len(row["keyed"][key]) for row in rows]) for key in range(2)]
    keyed_values = torch.cat(keyed).double()
    tokens = torch.cat([row["tokens"] for row in rows] or [_output_of_one(None)["tokens"]])
    return {
        "scores": torch.stack([row["scores"] for row in rows]) if rows else torch.zeros(0, 2, 3),
        "keyed": KeyedJaggedTensor(
            ["p", "q"],
            values=keyed_values.to(torch.int32),
            weights=keyed_values / 7,
            lengths=torch.cat(keyed_lengths).long(),
            stride=len(rows),
        ),
        "tokens": JaggedTensor(tokens, lengths=torch.tensor([len(row["tokens"]) for row in rows]).int()),
        "right": torch.tensor([row["right"] for row in rows], dtype=torch.bool),
        "step": 17,
    }


def _output_of_one(sample: int | None) -> dict:
    """Makes the output for one sample; None for an empty padding row."""
    if sample is None:
        return {
            "scores": torch.zeros(2, 3),
            "keyed": [torch.zeros(0)] * 2,
            "tokens": torch.zeros(0, 2).half(),
            "right": False,
        }
    rng = np.random.default_rng(sample + 1)
    bits = rng.integers(-(2**31), 2**31, (2, 3)).astype(np.int32)  # among them NaNs
    return {
        "scores": torch.from_numpy(bits).view(torch.float32),
        "keyed": [torch.from_numpy(rng.integers(0, 1000, rng.integers(0, 4))).float() for _ in range(2)],
        "tokens": torch.from_numpy(rng.normal(size=(rng.integers(0, 6), 2))).half(),
        "right": bool(rng.integers(2)),
    }
