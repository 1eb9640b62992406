"""Lists of a batch that one process holds: entries go with their rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.extensions.controller import merge, split_balanced
from commons.sequence_batch import BaseBatch

ROWS, COSTS = 6, [9, 1, 4, 4, 1, 7]
TEXTS = [f"text {row}" for row in range(ROWS)]


@dataclass
class Texts(BaseBatch):
    texts: list = field(default_factory=list)
    names: list = field(default_factory=list, metadata={"per_sample": False})


def padded(real: int = ROWS) -> Texts:
    lengths = torch.ones(ROWS, dtype=torch.int64) * (torch.arange(ROWS) < real)
    features = KeyedJaggedTensor(["item"], torch.arange(real), lengths=lengths)
    texts = TEXTS[:real] + [""] * (ROWS - real)
    return Texts(features, ROWS, {}, actual_batch_size=real, texts=texts, names=TEXTS)


def test_entries_go_with_their_rows_and_come_back():
    batch = {
        "ids": torch.arange(ROWS),
        "text": TEXTS,
        "pairs": tuple((row, str(row)) for row in range(ROWS)),
        "deep": {"records": [{"id": row} for row in range(ROWS)]},
        "names": ["a", "b"],
        "objects": np.array(TEXTS, dtype=object),
        "turns": np.array([[{"row": row}, None] for row in range(ROWS)], dtype=object),
        "rewards": np.arange(ROWS) / 2,
    }
    chunks, order = split_balanced(batch, 3, COSTS)
    for chunk in chunks:
        rows = chunk["ids"].tolist()
        assert chunk["text"] == [TEXTS[row] for row in rows]
        assert chunk["pairs"] == tuple((row, str(row)) for row in rows)
        assert chunk["deep"]["records"] == [{"id": row} for row in rows]
        assert chunk["names"] == ["a", "b"]
        for name in ("objects", "turns", "rewards"):
            assert chunk[name].dtype == batch[name].dtype
            assert chunk[name].tolist() == batch[name][rows].tolist()
    merged = merge(chunks, order)
    for name in ("objects", "turns", "rewards"):
        assert merged[name].tolist() == batch[name].tolist()
        assert merge([chunk[name] for chunk in chunks], order).tolist() == batch[name].tolist()
    for name in ("text", "pairs", "deep", "names"):
        assert merged[name] == batch[name]
    assert merge([chunk["text"] for chunk in chunks], order) == TEXTS
    assert merge([{"ids": of["ids"], "said": [f"to {text}" for text in of["text"]]} for of in chunks], order)[
        "said"
    ] == [f"to {text}" for text in TEXTS]


@pytest.mark.parametrize("real", [6, 4])
def test_entries_of_a_base_batch_go_with_its_rows(real):
    batch = padded(real)
    chunks, order = split_balanced(batch, 4, COSTS[:real])
    for chunk in chunks:
        rows = chunk.features.values().tolist()
        assert chunk.texts == [TEXTS[row] for row in rows] + [None] * (chunk.batch_size - len(rows))
        assert chunk.names == TEXTS
    merged = merge(chunks, order)
    assert merged.texts == TEXTS[:real] + [None] * (ROWS - real) and merged.names == TEXTS


class Shared(BatchShuffler):
    shared_fields = ("text", "scale")

    def get_workloads(self, batch):
        return batch["ids"] + 1


def test_what_is_named_as_shared_stays_whole_and_is_told_from_results_of_its_name():
    # Chunks have as many rows as there are entries of what is shared.
    batch = {"ids": torch.arange(ROWS), "text": TEXTS[: ROWS // 2], "scale": torch.ones(ROWS // 2)}
    chunks, order = split_balanced(batch, 2, Shared())
    assert all(chunk["text"] == batch["text"] and chunk["scale"] is batch["scale"] for chunk in chunks)
    merged = merge(chunks, order)
    assert merged["text"] == batch["text"] and merged["scale"] is batch["scale"]
    results = [{"scale": 2 * chunk["ids"]} for chunk in chunks]
    assert merge(results, order)["scale"].tolist() == [2 * row for row in range(ROWS)]
    with pytest.raises(ValueError, match="'scale' is named as shared, and has a row for each row"):
        merge([{"scale": torch.zeros(3), "ids": chunk["ids"]} for chunk in chunks], order)


def test_a_tensordict_moves_its_lists():
    batch = TensorDict({"ids": torch.arange(ROWS)}, batch_size=[ROWS])
    batch.set_non_tensor("text", TEXTS)
    chunks, order = split_balanced(batch, 3, COSTS)
    for chunk in chunks:
        assert list(chunk["text"]) == [TEXTS[row] for row in chunk["ids"].tolist()]
    assert list(merge(chunks, order)["text"]) == TEXTS


def test_lists_of_samples_are_refused_with_the_recipe():
    for batch in (
        [{"ids": torch.arange(ROWS)} for _ in range(ROWS)],
        {str(row): torch.arange(ROWS) for row in range(ROWS)},
        [np.arange(ROWS) for _ in range(ROWS)],
    ):
        with pytest.raises(TypeError, match=r"they may be fields or samples.*partition.refined\(costs, n\)"):
            split_balanced(batch, 2, COSTS)
