import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import RandomDistribution, SequenceDataset
from commons.datasets.item_sids import ItemSIDs
from commons.datasets.sid_batch import SIDDatasetSpec
from commons.datasets.sid_random_source import RandomSIDSource, random_item_sids

SIZES = (4, 8, 16)
SIDS = random_item_sids(SIZES, 30, seed=0)
NORMAL = RandomDistribution("normal", mean=3.0, std=10.0)


def source(history_length_dist=None, num_samples=200, seed=0, sids=SIDS, **changes):
    settings = {"max_history_length": 6, "contextual_vocab_sizes": {"age": 4, "job": 9}}
    spec = SIDDatasetSpec(**{"codebook_sizes": SIZES, **settings, **changes})
    return RandomSIDSource(sids, spec, history_length_dist, num_samples, seed)


def samples(of):
    return [of[index] for index in range(len(of))]


def history_lengths(of):
    return [len(sample.codes) - 1 for sample in samples(of)]


def test_a_sample_depends_on_the_seed_and_its_index_alone():
    few, many = source(num_samples=5, seed=3), source(num_samples=50, seed=3)
    many[0]
    np.testing.assert_array_equal(few[4].codes, many[4].codes)
    assert few[4].target_item == many[4].target_item
    assert few[4].contextual == many[4].contextual
    codes = [[sample.codes.tolist() for sample in samples(source(seed=seed))] for seed in (3, 4)]
    assert codes[0] != codes[1]
    assert codes[0][0] != codes[0][1]


def test_items_and_contextual_ids_are_drawn_from_all_that_there_are():
    sids = ItemSIDs(np.array([5, 70, 900]), np.array([[0, 1, 2], [3, 7, 15], [0, 0, 0]]))
    drawn = samples(source(sids=sids))
    codes_of = dict(zip(sids.items.tolist(), sids.codes.tolist(), strict=True))
    assert {sample.target_item for sample in drawn} == set(codes_of)
    for sample in drawn:
        assert sample.codes[-1].tolist() == codes_of[sample.target_item]
        assert all(codes in codes_of.values() for codes in sample.codes.tolist())
        assert sample.codes.dtype == np.int64
        assert {len(ids) for ids in sample.contextual.values()} == {1}
    for name, size in (("age", 4), ("job", 9)):
        assert {int(sample.contextual[name][0]) for sample in drawn} == set(range(size))


@pytest.mark.parametrize("max_candidate_length", [0, 1, 3])
def test_lengths_are_uniform_without_a_distribution_and_clipped_with_one(max_candidate_length):
    of = source(max_candidate_length=max_candidate_length)
    assert of.spec.max_candidate_length == max_candidate_length
    assert set(history_lengths(of)) == set(range(1, 7))
    for drawn, lengths in ((NORMAL, range(7)), (RandomDistribution("uniform", low=2, high=4), (2, 3))):
        assert set(history_lengths(source(drawn))) == set(lengths)


def test_the_spec_describes_the_batches():
    of = source(NORMAL, max_candidate_length=2)
    for batch in SequenceDataset(of, batch_size=30):
        for name, longest in of.spec.feature_to_max_seqlen.items():
            assert int(batch.feature_lengths(name).max()) <= longest
        assert batch.features["candidate"].lengths()[: batch.num_samples].min() == 3


@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 9))
def test_every_random_item_has_codes_of_its_own(sizes, num_items, seed):
    sids = random_item_sids(sizes, num_items, seed)
    sids.check_codebooks(sizes)
    assert sids.items.tolist() == list(range(min(num_items, int(np.prod(sizes)))))
    assert len(np.unique(sids.codes, axis=0)) == len(sids.items)
    assert sids.items.dtype == sids.codes.dtype == np.int64
    np.testing.assert_array_equal(random_item_sids(sizes, num_items, seed).codes, sids.codes)


@pytest.mark.parametrize("num_items", [20, 200])  # a share of all tuples, and most of them
def test_random_codes_are_uniform(num_items):
    sids = [random_item_sids((4, 64), num_items, seed) for seed in range(200)]
    assert not np.array_equal(sids[0].codes, sids[1].codes)
    counts = np.bincount(np.concatenate([drawn.codes[:20, 0] for drawn in sids]), minlength=4)
    np.testing.assert_allclose(counts, 1000, rtol=0.15)  # also among the first items: they are in no order


@pytest.mark.parametrize("size", [8192, 2**62])
def test_the_product_of_large_codebooks_is_not_made(size):
    sids = random_item_sids((size,) * 4, 1000, seed=0)
    assert sids.codes.shape == (1000, 4)
    assert len(np.unique(sids.codes, axis=0)) == 1000
    assert sids.codes.min() >= 0
    assert size // 2 < sids.codes.max() < size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: random_item_sids((), 5, 0), r"codebook_sizes = \(\): expected positive sizes, at least one"),
        (lambda: random_item_sids((4, 0), 5, 0), r"codebook_sizes = \(4, 0\): expected positive sizes"),
        (lambda: random_item_sids((4, 8), 0, 0), "num_items = 0, seed = 0: expected at least 1 and at"),
        (lambda: random_item_sids((4, 8), 5, -1), "num_items = 5, seed = -1: expected at least 1 and at"),
        (lambda: source(num_samples=-1), "num_samples = -1, seed = 0: expected at least 0"),
        (lambda: source(seed=-1), "num_samples = 200, seed = -1: expected at least 0"),
        (lambda: source(codebook_sizes=(4, 8)), r"codebook_sizes = \(4, 8\): expected 3, as items have 3"),
        (lambda: source(num_samples=5)[-1], "sample -1: expected 0 to 4"),
        (lambda: source(num_samples=5)[5], "sample 5: expected 0 to 4"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises((ValueError, IndexError), match=message):
        make()
