"""Lists and numpy arrays of a batch that one process holds: entries go with their rows."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.extensions.controller import merge, split_balanced
from commons.sequence_batch import register_batch_type
from tests.commons.distributed.field_kinds import Held

ROWS, COSTS = 6, [9, 1, 4, 4, 1, 7]
TEXTS = [f"text {row}" for row in range(ROWS)]


def padded(real: int) -> Held:
    """Makes a batch with a text for each row, and texts that all rows share."""
    features = KeyedJaggedTensor(["item"], torch.arange(real), lengths=(torch.arange(ROWS) < real).long())
    texts = TEXTS[:real] + [""] * (ROWS - real)
    return Held(features, ROWS, {}, actual_batch_size=real, more=texts, shared=TEXTS)


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
    assert merge([chunk["ids"] + 0.5 for chunk in chunks], order).equal(batch["ids"] + 0.5)
    said = [{"ids": chunk["ids"], "said": [f"to {text}" for text in chunk["text"]]} for chunk in chunks]
    assert merge(said, order)["said"] == [f"to {text}" for text in TEXTS]


class NameShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return torch.tensor([len(name) for name in batch["names"]])


def test_a_shuffler_sees_a_batch_of_arrays_alone():
    batch = {"names": np.array(["a" * length for length in (5, 1, 4, 2)], dtype=object)}
    chunks, order = split_balanced(batch, 2, NameShuffler())
    assert [sum(map(len, chunk["names"])) for chunk in chunks] == [6, 6]
    assert merge(chunks, order)["names"].tolist() == batch["names"].tolist()


def test_joined_integers_are_exact_texts_may_be_wider_and_other_kinds_are_refused():
    ids = [2**60 + 1, 2**60 + 3]
    _, order = split_balanced({"row": torch.arange(2)}, 3, [1, 1])
    results = [np.array([ids[row] for row in samples]) for samples in order.partition]
    assert merge(results, order).tolist() == ids  # without samples, an array is one of floats
    for texts in (["a"], ["longer"]), (["a"], np.array([None])):
        assert merge([*map(np.array, texts), np.arange(0)], order).tolist() == [text for (text,) in texts]
    times = [np.array(["2026"], "M8[Y]"), np.array(["2026-01-02"], "M8[D]"), np.arange(0)]
    assert merge(times, order).dtype == np.dtype("M8[D]")
    with pytest.raises(ValueError, match="other dtypes in 'a'"):
        merge([{"a": np.arange(1)}, {"a": np.array(["x"])}, {"a": np.arange(0)}], order)


class Scores(np.ndarray):
    """An array that a user has registered."""


register_batch_type(
    Scores,
    parts=lambda scores: {"values": torch.from_numpy(np.array(scores))},
    replaced=lambda scores, parts: parts["values"].numpy().view(Scores),
)


def test_a_registered_kind_of_array_moves_by_its_parts():
    batch = {"scores": np.arange(3.0).view(Scores), "ids": torch.arange(3)}
    chunks, order = split_balanced(batch, 2, [3, 2, 1])
    for part in (*chunks, merge(chunks, order)):
        assert part["scores"].tolist() == part["ids"].tolist() and type(part["scores"]) is Scores


@pytest.mark.parametrize("real", [6, 4])
def test_entries_of_a_base_batch_go_with_its_rows(real):
    batch = padded(real)
    chunks, order = split_balanced(batch, 4, COSTS[:real])
    for chunk in chunks:
        rows = chunk.features.values().tolist()
        assert chunk.more == [TEXTS[row] for row in rows] + [None] * (chunk.batch_size - len(rows))
        assert chunk.shared == TEXTS
    merged = merge(chunks, order)
    assert merged.more == TEXTS[:real] + [None] * (ROWS - real) and merged.shared == TEXTS


class Shared(BatchShuffler):
    shared_fields = ("text", "scale")

    def get_workloads(self, batch):
        return batch["ids"] + 1


def test_what_is_named_as_shared_stays_whole_and_is_told_from_results_of_its_name():
    # Chunks have as many rows as there are entries of what is shared.
    batch = {"ids": torch.arange(ROWS), "text": TEXTS[: ROWS // 2], "scale": torch.ones(ROWS // 2)}
    chunks, order = split_balanced(batch, 2, Shared())
    assert all(chunk["text"] == batch["text"] and chunk["scale"] is batch["scale"] for chunk in chunks)
    for returned in (chunks, [pickle.loads(pickle.dumps(chunk)) for chunk in chunks]):
        merged = merge(returned, order)
        assert merged["text"] == batch["text"] and merged["scale"].equal(batch["scale"])
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


def test_a_list_of_samples_is_refused_with_the_recipe():
    with pytest.raises(TypeError, match=r"they may be fields or samples.*partition.refined\(costs, n\)"):
        split_balanced([{"ids": torch.arange(ROWS)}] * ROWS, 2, COSTS)


def test_a_list_with_a_tensor_per_sample_is_refused_where_the_batch_has_no_fields():
    batch = {"ids": torch.arange(4), "fields": [torch.arange(4), torch.arange(4) + 4]}
    chunks, order = split_balanced(batch, 2, [1] * 4)
    merged = merge(iter(chunks), order)
    assert merged["ids"].equal(batch["ids"]) and all(map(torch.equal, merged["fields"], batch["fields"]))
    of_samples = [{"scores": [row.repeat(2) for row in chunk["ids"]], **chunk} for chunk in chunks]
    with pytest.raises(TypeError, match="scores is a list of 2 similar entries, in a batch of 2 rows"):
        merge(of_samples, order)
    of_layers = [{"layers": [chunk["ids"]] * 3} for chunk in chunks]
    assert all(layer.equal(batch["ids"]) for layer in merge(of_layers, order)["layers"])
