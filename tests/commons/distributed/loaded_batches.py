"""Batches as ranks load them, outputs that a model may compute, and a bitwise comparison."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets import HSTUBatch
from commons.distributed.exchange import EXCHANGES
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch
from tests.drawn_batches import draw_batch
from tests.process_pool import rank_device

BOTH = sorted(EXCHANGES)
FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=1, head_dim=128)


def check_identical(got, expected, where="batch") -> None:
    """Checks that both are the same, bit for bit: -0.0 is not 0.0, and NaNs are equal if their bits are."""
    assert type(got) is type(expected), where
    if isinstance(got, TensorDictBase):
        assert got.batch_size == expected.batch_size, where
        got, expected = dict(got.items(True, True)), dict(expected.items(True, True))
    if isinstance(got, BaseBatch):
        for field in dataclasses.fields(got):
            check_identical(getattr(got, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(got, dict):
        assert list(got) == list(expected), where
        for key in got:
            check_identical(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(got, JaggedTensor | KeyedJaggedTensor):
        if isinstance(got, KeyedJaggedTensor):
            assert (got.keys(), got.stride()) == (expected.keys(), expected.stride()), where
        for part in ("lengths", "values", "weights_or_none"):
            check_identical(getattr(got, part)(), getattr(expected, part)(), f"{where}.{part}")
    elif isinstance(got, torch.Tensor) and got.is_nested:
        for part in ("offsets", "values"):
            check_identical(getattr(got, part)(), getattr(expected, part)(), f"{where}.{part}")
    elif isinstance(got, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        assert _bytes(got) == _bytes(expected), where
    else:
        assert got == expected, where


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()


def agreed(shuffler, labels="keyed"):
    """Runs a first step, in which ranks agree on the fields; later steps are like any other."""
    shuffler.shuffle(draw_batch(np.random.default_rng(0), 0, 1, 1, labels))
    return shuffler


def loaded_batch(shuffler, case):
    """Returns this rank's batch of the case as `plan` takes it, and as `exchange` does."""
    rank = dist.get_rank()
    sizes = case.batches[rank]
    if sizes is None:
        return None, shuffler.padding_batch().to(rank_device())
    batch = draw_batch(np.random.default_rng((case.seed, rank)), 1000 * (rank + 1), *sizes, case.labels)
    return batch, batch.to(rank_device())


def lopsided_batch():
    """Draws four samples, which are heavier on rank 0."""
    rank = dist.get_rank()
    batch = draw_batch(np.random.default_rng(rank), 1000 * (rank + 1), 4, 4)
    batch.workload = torch.arange(4) + 100 * (rank == 0)
    return batch


def sample_ids(batch) -> list[int]:
    return batch.matrix[: batch.num_samples, 0, 0].long().tolist()


def outputs_of(ids: list[int], num_padding: int, junk: bool = False) -> dict:
    """Makes what a model may compute for samples, a function of each sample's number; then padding rows.

    Lengths differ from those in the batch. With `junk`, padding rows are not empty, as a model leaves them.
    """
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


@dataclass(eq=False)
class HistoryBatch(HSTUBatch):
    workload: torch.Tensor | None = None


def history_batch(rng: np.random.Generator, rows: int) -> HistoryBatch:
    """Draws lognormal histories of items, actions, and a label per item, as HSTU trains on."""
    lengths = torch.from_numpy(rng.lognormal(5, 1.2, rows).clip(1, 4096).astype(np.int64))
    total = int(lengths.sum())
    ids = torch.from_numpy(rng.integers(0, 10**6, 2 * total + rows))
    batch = HistoryBatch(
        features=KeyedJaggedTensor(
            ["user", "item", "action"],
            ids,
            lengths=torch.cat([torch.ones(rows, dtype=torch.int64), lengths, lengths]),
        ),
        batch_size=rows,
        feature_to_max_seqlen={"user": 1, "item": 4096, "action": 4096},
        contextual_feature_names=["user"],
        labels=KeyedJaggedTensor(["label"], torch.from_numpy(rng.integers(0, 2, total)), lengths=lengths),
        action_feature_name="action",
    )
    batch.workload = FLOPS.per_sample(batch.num_tokens())
    return batch
