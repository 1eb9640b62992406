import dataclasses

import numpy as np
import pytest
from torch.utils.data import DataLoader

from commons.datasets import (
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    HSTUSource,
    SequenceDataset,
    check_ids,
)
from tests.commons.datasets.internals import HSTUSample, collate_hstu_batch
from tests.commons.datasets.random_args import random_args

SPEC = random_args(max_num_candidates=2).spec()
WITHOUT_ACTIONS = random_args(action_feature_name=None).spec()
UNBOUNDED = dataclasses.replace(
    WITHOUT_ACTIONS,
    tables=(DynamicEmbeddingArgs(["item"], "item", 10), EmbeddingArgs(["user"], "user", 3, "data_parallel")),
)


class CountingSource(HSTUSource):
    """Sample i is of user i, with i % 5 items."""

    spec = SPEC

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        items = np.arange(index % 5) + 10 * index
        num_candidates = min(2, len(items))
        return HSTUSample(
            contextual={"user": np.array([index])},
            items=items,
            actions=items + 1,
            labels=items[len(items) - num_candidates :] + 2,
            num_candidates=num_candidates,
        )


@pytest.mark.parametrize("single_rank", [False, True])
def test_batches_have_their_rows_and_padding_on_the_ranks_that_load(single_rank):
    found = []
    for rank in range(2):
        dataset = SequenceDataset(CountingSource(23), 4, rank, 2, single_rank=single_rank)
        batches = list(DataLoader(dataset, batch_size=None, sampler=dataset.sampler, num_workers=2))
        assert all(batch.batch_size == batch.features.stride() == 4 << single_rank for batch in batches)
        assert dataset.loads_here == bool(batches)
        found.append([batch.features["user"].values().tolist() for batch in batches])
        assert [batch.actual_batch_size for batch in batches] == list(map(len, found[-1]))
    steps = [list(range(first, min(first + 4, 23))) for first in range(0, 23, 4)]
    if single_rank:
        assert found == [[steps[0] + steps[1], steps[2] + steps[3], steps[4] + steps[5]], []]
    else:
        assert found == [steps[::2], steps[1::2]]


def test_a_loader_without_the_sampler_is_refused():
    dataset = SequenceDataset(CountingSource(23), 4)
    with pytest.raises(TypeError, match="step = 0: expected one of dataset"):
        next(iter(DataLoader(dataset, batch_size=None)))


def test_a_batch_has_its_samples_rows_then_padding():
    source = CountingSource(9)
    batch = collate_hstu_batch([source[3], source[5], source[1]], SPEC, batch_size=4)
    found = {
        name: of.to_dense()
        for name, of in (*batch.features.to_dict().items(), *batch.labels.to_dict().items())
    }
    assert {name: [row.tolist() for row in rows] for name, rows in found.items()} == {
        "user": [[3], [5], [1], []],
        "item": [[30, 31, 32], [], [10], []],
        "act": [[31, 32, 33], [], [11], []],
        "label": [[33, 34], [], [12], []],
    }
    assert batch.num_candidates.tolist() == [2, 0, 1, 0]
    assert (batch.batch_size, batch.actual_batch_size, batch.max_num_candidates) == (4, 3, 2)
    assert batch.feature_to_max_seqlen == {"user": 2, "item": 8, "act": 8}
    assert batch.contextual_feature_names == ["user"]
    assert (batch.item_feature_name, batch.action_feature_name) == ("item", "act")


def test_a_batch_without_candidates_and_actions():
    sample = CountingSource(9)[3]
    batch = collate_hstu_batch([sample], WITHOUT_ACTIONS, batch_size=1)
    assert batch.features.keys() == ["user", "item"]
    assert batch.num_candidates is None
    with pytest.raises(ValueError, match="2 samples do not fit in a batch of 1 rows"):
        collate_hstu_batch([sample, sample], SPEC, batch_size=1)
    with pytest.raises(ValueError, match="a sample has no actions"):
        collate_hstu_batch([dataclasses.replace(sample, actions=None)], SPEC, batch_size=1)


def check(rows, users, spec=WITHOUT_ACTIONS):
    samples = [
        HSTUSample({"user": np.array([user])}, np.array(items, dtype=np.int64), None, np.zeros(0, int), 0)
        for items, user in zip(rows, users, strict=True)
    ]
    check_ids(collate_hstu_batch(samples, spec, batch_size=5), spec)


def test_ids_of_their_tables_pass_and_a_dynamic_table_takes_any_but_the_smallest():
    check([[0, 49], [], [3]], [0, 1, 8])
    assert UNBOUNDED.unbounded_features == {"item"}
    check([[0, 10, 2**63 - 1], [-1, -(2**63) + 1], []], [0, 1, 2], UNBOUNDED)


@pytest.mark.parametrize(
    ("rows", "users", "spec", "message"),
    [
        (
            [[0], [], [1, 2, 50]],
            [0, 0, 0],
            WITHOUT_ACTIONS,
            "'item' has id 50 in row 2; its table has 50 rows",
        ),
        ([[0], [-4, 51], [1]], [0, 0, 0], WITHOUT_ACTIONS, "'item' has id -4 in row 1"),
        ([[0], [1, -(2**63), 10]], [0, 1], UNBOUNDED, f"'item' has id {-(2**63)} in row 1; ids of a dyn"),
        ([[99], [], []], [0, 3, 0], UNBOUNDED, "'user' has id 3 in row 1; its table has 3 rows"),
    ],
)
def test_another_id_is_named_with_its_feature_row_and_table_size(rows, users, spec, message):
    with pytest.raises(ValueError, match=message):
        check(rows, users, spec)
