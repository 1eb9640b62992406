import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from commons.datasets import (
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    HSTUSample,
    HSTUSource,
    SequenceDataset,
    SequenceDatasetSpec,
    check_ids,
    collate_hstu_batch,
)

SPEC = SequenceDatasetSpec(
    contextual_feature_names=("user",),
    item_feature_name="item",
    action_feature_name="act",
    feature_to_max_seqlen={"user": 1, "item": 5, "act": 5},
    tables=(EmbeddingArgs(["user", "item", "act"], "all", 10_000, "data_parallel"),),
    max_num_candidates=2,
    num_classes=5,
    positive_class=None,
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


def batches_by_rank(num_samples, batch_size, num_ranks, start_sample=0, epoch=0, **options):
    source, by_rank = CountingSource(num_samples), []
    for rank in range(num_ranks):
        dataset = SequenceDataset(source, batch_size, rank, num_ranks, **options)
        dataset.set_epoch(epoch, start_sample)
        by_rank.append(list(dataset))
        assert len(by_rank[-1]) == len(dataset)
    return by_rank


def users(batch):
    return batch.features["user"].values().tolist()


def global_order(by_rank):
    return [user for step in zip(*by_rank, strict=True) for batch in step for user in users(batch)]


shapes = {
    "num_samples": st.integers(0, 60),
    "batch_size": st.integers(1, 7),
    "num_ranks": st.integers(1, 4),
    "shuffle": st.booleans(),
}


@settings(max_examples=60)
@given(**shapes)
def test_every_sample_is_in_exactly_one_batch_of_one_rank(num_samples, batch_size, num_ranks, shuffle):
    by_rank = batches_by_rank(num_samples, batch_size, num_ranks, shuffle=shuffle)
    assert len({len(batches) for batches in by_rank}) == 1
    assert sorted(global_order(by_rank)) == list(range(num_samples))
    for step in zip(*by_rank, strict=True):
        counts = [batch.actual_batch_size for batch in step]
        assert max(counts) - min(counts) <= 1
        assert all(batch.batch_size == batch.features.stride() == batch_size for batch in step)
    for batches in by_rank:
        assert all(batch.actual_batch_size == batch_size for batch in batches[:-1])


@settings(max_examples=60)
@given(**shapes, start=st.floats(0, 1), epoch=st.integers(0, 3))
def test_the_order_is_that_of_one_rank_wherever_it_starts(
    num_samples, batch_size, num_ranks, shuffle, start, epoch
):
    options = {"shuffle": shuffle, "epoch": epoch, "seed": 5}
    start_sample = int(start * num_samples)
    whole = global_order(batches_by_rank(num_samples, 3, 1, **options))
    resumed = global_order(batches_by_rank(num_samples, batch_size, num_ranks, start_sample, **options))
    assert resumed == whole[start_sample:]


def test_shuffled_epochs_differ_and_repeat():
    def order(**options):
        return global_order(batches_by_rank(50, 4, 2, **options))

    first = order(shuffle=True)
    assert first == order(shuffle=True) != list(range(50)) == order(epoch=3)
    assert first not in (order(epoch=1, shuffle=True), order(shuffle=True, seed=1))


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
    assert batch.features.keys() == ["user", "item", "act"]
    assert batch.num_candidates.tolist() == [2, 0, 1, 0]
    assert (batch.batch_size, batch.actual_batch_size, batch.max_num_candidates) == (4, 3, 2)
    assert batch.feature_to_max_seqlen == {"user": 1, "item": 5, "act": 5}
    assert batch.contextual_feature_names == ["user"]
    assert (batch.item_feature_name, batch.action_feature_name) == ("item", "act")


def test_a_batch_without_candidates_and_actions():
    spec = dataclasses.replace(SPEC, max_num_candidates=0, action_feature_name=None)
    batch = collate_hstu_batch([CountingSource(9)[3]], spec, batch_size=1)
    assert batch.features.keys() == ["user", "item"]
    assert batch.num_candidates is None
    sample = CountingSource(9)[3]
    with pytest.raises(ValueError, match="2 samples do not fit in a batch of 1 rows"):
        collate_hstu_batch([sample, sample], SPEC, batch_size=1)
    with pytest.raises(ValueError, match="a sample has no actions"):
        collate_hstu_batch([dataclasses.replace(sample, actions=None)], SPEC, batch_size=1)


def test_loader_workers_give_the_batches_in_order():
    dataset = SequenceDataset(CountingSource(23), batch_size=4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert [user for batch in loader for user in users(batch)] == list(range(23))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 0}, "batch_size = 0: expected at least 1"),
        ({"batch_size": 1, "rank": 2, "num_ranks": 2}, "rank = 2: expected 0 to 1, as num_ranks = 2"),
        ({"batch_size": 1, "seed": -1}, "seed = -1"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceDataset(CountingSource(5), **arguments)
    dataset = SequenceDataset(CountingSource(5), batch_size=1)
    with pytest.raises(ValueError, match="epoch = -1"):
        dataset.set_epoch(-1)
    with pytest.raises(ValueError, match="start_sample = 6: expected 0 to 5"):
        dataset.set_epoch(0, start_sample=6)


CHECKED = dataclasses.replace(
    SPEC,
    action_feature_name=None,
    max_num_candidates=0,
    tables=(
        EmbeddingArgs(["user"], "user", 3, "data_parallel"),
        EmbeddingArgs(["item"], "item", 10, "model_parallel"),
    ),
)
UNBOUNDED = dataclasses.replace(
    CHECKED, tables=(CHECKED.tables[0], DynamicEmbeddingArgs(["item"], "item", 10))
)


def check(rows, users, spec=CHECKED):
    samples = [
        HSTUSample({"user": np.array([user])}, np.array(items, dtype=np.int64), None, np.zeros(0, int), 0)
        for items, user in zip(rows, users, strict=True)
    ]
    check_ids(collate_hstu_batch(samples, spec, batch_size=5), spec)


def test_ids_of_their_tables_pass_and_a_dynamic_table_takes_any_but_the_smallest():
    check([[0, 9], [], [3]], [0, 1, 2])
    check([], [])
    assert UNBOUNDED.unbounded_features == {"item"}
    check([[0, 10, 2**63 - 1], [-1, -(2**63) + 1], []], [0, 1, 2], UNBOUNDED)


@pytest.mark.parametrize(
    ("spec", "rows", "users", "message"),
    [
        (CHECKED, [[0], [], [1, 2, 10]], [0, 0, 0], "'item' has id 10 in row 2; its table has 10 rows, so"),
        (CHECKED, [[0], [-4, 11], [1]], [0, 0, 0], "'item' has id -4 in row 1"),
        (CHECKED, [[99], [], []], [0, 3, 0], "'user' has id 3 in row 1; its table has 3 rows"),
        (
            UNBOUNDED,
            [[0], [], [1, -(2**63), 10]],
            [0, 1, 2],
            f"'item' has id {-(2**63)} in row 2; ids of a dyn",
        ),
        (UNBOUNDED, [[99], [], []], [0, 3, 0], "'user' has id 3 in row 1; its table has 3 rows"),
    ],
)
def test_another_id_is_named_with_its_feature_row_and_table_size(spec, rows, users, message):
    with pytest.raises(ValueError, match=message):
        check(rows, users, spec)


def users_of(batches) -> list[list[int]]:
    return sorted(batch.features["user"].values().tolist() for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_persistent_workers_follow_the_epoch_and_where_it_starts(num_workers):
    source = CountingSource(24)
    dataset = SequenceDataset(source, 2, 0, 2, shuffle=True, seed=3)
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(dataset, batch_size=None, **workers)
    for epoch, start in ((0, 8), (1, 0), (2, 4), (2, 0), (5, 20)):
        dataset.set_epoch(epoch, start)
        alone = SequenceDataset(source, 2, 0, 2, shuffle=True, seed=3)
        alone.set_epoch(epoch, start)
        assert len(loader) == len(alone)
        assert users_of(loader) == users_of(alone)


def test_an_epoch_counter_of_someone_else_may_not_undo_a_resume():
    dataset = SequenceDataset(CountingSource(24), 2, 0, 2)
    dataset.set_epoch(3, start_sample=8)
    with pytest.raises(RuntimeError, match=r"set_epoch\(0\) would undo set_epoch\(3, start_sample=8\)"):
        dataset.set_epoch(0)  # as accelerate's loaders do at each iter
    assert len(list(dataset)) == 4
    dataset.set_epoch(4)
    assert len(list(dataset)) == 6
