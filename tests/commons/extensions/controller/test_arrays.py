"""Numpy arrays that a controller splits and merges, and a process without TorchRec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from commons.distributed import BatchShuffler
from commons.extensions.controller import merge, split_balanced
from commons.sequence_batch import register_batch_type
from tests.commons.sequence_batch.internals import Rows
from tests.drawn_batches import draw_batch

REPOSITORY = Path(__file__).parents[4]


def test_merged_arrays_have_nothing_in_padding_rows():
    batch = draw_batch(np.random.default_rng(0), 0, 7, 5)
    _, order = split_balanced(batch, 2, batch.workload)
    results = [
        {"row": np.array([*samples, *[99] * (num_rows - len(samples))], dtype=dtype)}
        for dtype in (object, np.int64)
        for samples, num_rows in zip(order.partition, order.chunk_rows, strict=True)
    ]
    assert merge(results[:2], order)["row"].tolist() == [0, 1, 2, 3, 4, None, None]
    assert merge(results[2:], order)["row"].tolist() == [0, 1, 2, 3, 4, 0, 0]


def test_merged_integers_are_exact_where_a_chunk_without_samples_returned_floats():
    ids = np.array([2**60 + 1, 2**60 + 3, 2**60 + 5])
    chunks, order = split_balanced({"row": torch.arange(3)}, 4, [3, 2, 1])
    results = [{"id": np.array([ids[row] for row in chunk["row"].tolist()])} for chunk in chunks]
    assert merge(results, order)["id"].tolist() == ids.tolist()


class NameShuffler(BatchShuffler):
    def get_workloads(self, batch: dict[str, np.ndarray]) -> torch.Tensor:
        return torch.tensor([len(name) for name in batch["names"]])


def test_a_shuffler_sees_a_batch_of_arrays_alone():
    batch = {"names": np.array(["a" * length for length in (5, 1, 4, 2)], dtype=object)}
    chunks, order = split_balanced(batch, 2, NameShuffler())
    assert [sum(map(len, chunk["names"])) for chunk in chunks] == [6, 6]
    assert merge(chunks, order)["names"].tolist() == batch["names"].tolist()


class Scores(np.ndarray):
    """An array that a user has registered."""


register_batch_type(
    Scores,
    parts=lambda scores: {"values": torch.from_numpy(np.array(scores))},
    replaced=lambda scores, parts: parts["values"].numpy().view(Scores),
)


def test_a_registered_kind_of_array_moves_by_its_parts():
    view = Rows({"scores": np.arange(3.0).view(Scores), "ids": torch.arange(3)})
    flipped = {name: value.flip(0) for name, value in view.fields.items()}
    moved = view.replaced(flipped, 3, 3).batch
    assert moved["scores"].tolist() == [2, 1, 0] == moved["ids"].tolist()
    assert type(moved["scores"]) is Scores


WITHOUT_TORCHREC = """
import sys
sys.modules.update(dict.fromkeys(("torchrec", "fbgemm_gpu", "tensordict")))
import numpy as np, torch
from commons.distributed import BatchShuffler
from commons.extensions.controller import merge, split_balanced

class Shuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch["mask"].sum(1) ** 2

rows = [torch.arange(row % 4 + 1) for row in range(10)]
names = np.array([f"prompt {row}" for row in range(10)], dtype=object)
batch = {"mask": torch.rand(10, 8) < 0.7, "names": names}
batch["nested"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
for workloads in (np.arange(10), Shuffler()):
    chunks, order = split_balanced(batch, 3, workloads, groups=[row // 2 for row in range(10)])
    assert [len(chunk["names"]) for chunk in chunks] == order.num_samples.tolist()
    merged = merge(chunks, order)
    assert merged["mask"].equal(batch["mask"]) and merged["names"].tolist() == names.tolist()
    assert merged["nested"].values().equal(batch["nested"].values())
"""


def test_a_controller_needs_neither_torchrec_nor_fbgemm():
    command = [sys.executable, "-c", WITHOUT_TORCHREC]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
