import copy
from dataclasses import replace

import numpy as np
import pytest
from torch.utils.data import DataLoader

from commons.datasets import (
    FeatureArgs,
    RandomSource,
    RetrievalSource,
    SequenceDataset,
    SequencesMeta,
    UserSequences,
    UserSequenceSource,
    check_ids,
)
from tests.commons.datasets.internals import NEGATIVES
from tests.commons.datasets.random_args import random_args

ITEMS = [[11, 30, 12, 14], [13], [12, 11], [30, 13, 11, 12, 14, 40]]


def sequences():
    """Four users; ids of items are 11 to 40, with gaps."""
    sizes = {"user_id": 5, "movie_id": 41, "rating": 6}
    meta = SequencesMeta("ml-100k", ["user_id"], "movie_id", "rating", sizes, num_classes=5, positive_class=3)
    items = np.concatenate(ITEMS).astype(np.int32)
    offsets = np.cumsum([0, *map(len, ITEMS)])
    return UserSequences(meta, {"user_id": np.arange(1, 5)}, items, items % 5 + 1, offsets)


def movielens(split, num_negatives=8, seed=0, max_history_seqlen=100, **options):
    histories = UserSequenceSource(sequences(), split, max_history_seqlen, num_held_out=1, **options)
    return RetrievalSource(histories, split, num_negatives, seed)


def random_histories(split="train"):
    args = random_args(FeatureArgs(["item"], 40, is_jagged=True), action_feature_name=None)
    return RetrievalSource(RandomSource(args, 200, seed=0), split, 4, seed=0)


def samples(source):
    return [source[index] for index in range(len(source))]


def drawn(source, epoch):
    return [sample.negatives.tolist() for sample in samples(source.for_epoch(epoch))]


def test_training_leaves_out_the_last_item_and_evaluation_is_about_it():
    train, held_out = (samples(movielens(split)) for split in ("train", "eval"))
    assert [sample.items.tolist() for sample in train] == [[11, 30, 12], [13], [12], [30, 13, 11, 12, 14]]
    assert [sample.labels.tolist() for sample in train] == [[30, 12], [], [], [13, 11, 12, 14]]
    assert [sample.items.tolist() for sample in held_out] == [ITEMS[0], ITEMS[2], ITEMS[3]]
    assert [sample.labels.tolist() for sample in held_out] == [[14], [11], [40]]
    assert all(not len(sample.negatives) for sample in held_out)


def test_negatives_are_a_function_of_seed_epoch_and_sample():
    source = movielens("train")
    assert drawn(source, 2) == drawn(movielens("train"), 2) == drawn(source.for_epoch(5), 2)
    different = [*drawn(source, 0), *drawn(source, 1), *drawn(movielens("train", seed=1), 0)]
    assert len({tuple(negatives) for negatives in different}) == len(different)
    assert drawn(source, 0) == [sample.negatives.tolist() for sample in samples(source)]


def test_negatives_are_uniform_over_the_items_that_occur():
    source = movielens("train", num_negatives=6000)
    assert source.catalogue.tolist() == [11, 12, 13, 14, 30, 40]
    ids, counts = np.unique(source[0].negatives, return_counts=True)
    assert ids.tolist() == source.catalogue.tolist()
    assert abs(counts - 1000).max() < 150  # five standard deviations
    assert random_histories().catalogue.tolist() == list(range(50))


def test_negatives_share_no_draw_with_random_histories():
    args = random_args(FeatureArgs(["item"], 12), action_feature_name=None)
    source = RetrievalSource(RandomSource(args, 20, seed=3), "train", 12, seed=3)
    histories = [sample.items.tolist() for sample in samples(source)]
    assert all(negatives not in histories for epoch in range(20) for negatives in drawn(source, epoch))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_batches_have_one_schema_and_ids_of_their_tables(split):
    source = movielens(split)
    batch, negatives = source.collate([source[0], source[1]], 3), source.spec.negatives_feature_name
    assert batch.features.keys() == ["user_id", "movie_id", "rating", negatives]
    assert batch.features[negatives].lengths().tolist() == ([8, 8, 0] if split == "train" else [0, 0, 0])
    lengths = [len(source[index].items) for index in range(2)]
    assert batch.num_tokens().tolist() == [1 + 2 * lengths[0], 1 + 2 * lengths[1], 0]
    check_ids(batch, source.spec)
    batch.features.values()[-1] = 41
    with pytest.raises(ValueError, match="has id 41"):
        check_ids(batch, source.spec)


def test_random_evaluation_samples_have_one_label_if_there_is_something_before_it():
    evaluation = samples(random_histories(split="eval"))
    assert {len(sample.items) for sample in evaluation} >= {1, 2}
    for sample in evaluation:
        assert sample.labels.tolist() == sample.items[1:][-1:].tolist()


class RotatedHistories(UserSequenceSource):
    """Histories that begin elsewhere each epoch."""

    epoch = 0

    def for_epoch(self, epoch):
        other = copy.copy(self)
        other.epoch = epoch
        return other

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return replace(sample, items=np.roll(sample.items, self.epoch))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_drawn_anew_each_epoch_from_the_histories_of_it(num_workers):
    histories = RotatedHistories(sequences(), "train", 100, num_held_out=1)
    source = RetrievalSource(histories, "train", 8, seed=0)
    dataset = SequenceDataset(source, batch_size=1)
    for epoch in (0, 1, 3, 1):
        dataset.set_epoch(epoch)
        loader = DataLoader(dataset, batch_size=None, sampler=dataset.sampler, num_workers=num_workers)
        batches = list(loader)
        items, negatives = (
            [batch.features[name].values().tolist() for batch in batches]
            for name in ("movie_id", source.spec.negatives_feature_name)
        )
        assert items == [sample.items.tolist() for sample in samples(histories.for_epoch(epoch))]
        assert negatives == drawn(movielens("train"), epoch)  # whatever the histories are
    assert histories.epoch == 0


def test_arguments_are_checked():
    for make, message in (
        (lambda: UserSequenceSource(sequences(), "test", 5), "split = 'test': expected train, valid"),
        (lambda: movielens("train", num_negatives=0), "num_negatives = 0"),
        (lambda: movielens("train", max_num_candidates=2), "max_num_candidates = 2: expected 0"),
        (lambda: movielens("train", max_history_seqlen=1), "most items of a sample = 1: expected at least 2"),
        (lambda: RetrievalSource(movielens("train"), "train", 3, 0), "a feature is named 'negative_items'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("actions", [True, False])
@pytest.mark.parametrize("contextual", [True, False])
def test_actions_and_features_of_users_may_be_left_out(actions, contextual):
    histories = UserSequenceSource(sequences(), "train", 100, num_held_out=1)
    source = RetrievalSource(histories, "train", 4, 0, actions, contextual)
    names = ["user_id"] * contextual + ["movie_id"] + ["rating"] * actions + [NEGATIVES]
    assert source.spec.feature_names == names
    assert sorted(name for table in source.spec.tables for name in table.feature_names) == sorted(names)
    for batch in SequenceDataset(source, batch_size=2):
        assert batch.features.keys() == names
        check_ids(batch, source.spec)
    with_all = RetrievalSource(histories, "train", 4, 0)
    assert [one.items.tolist() for one in samples(source)] == [
        one.items.tolist() for one in samples(with_all)
    ]
