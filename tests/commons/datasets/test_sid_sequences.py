from itertools import repeat

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import RandomSIDSource, SequenceDataset, SIDSample
from commons.datasets.item_sids import ItemSIDs
from commons.datasets.sid_batch import SIDDatasetSpec
from commons.datasets.sid_sequences import SIDSequenceSource

SIZES = (4, 8, 16)
NUM_ITEMS = 20
CODES = np.random.default_rng(0).integers(0, SIZES, (NUM_ITEMS, len(SIZES)))
SIDS = ItemSIDs(10 * np.arange(NUM_ITEMS), CODES)
SEQUENCES = [[30, 10, 40, 10, 50, 90], [20], [60, 50, 30], [70, 80]]


def spec(max_history_length=5, max_candidate_length=1, **contextual):
    return SIDDatasetSpec(SIZES, max_history_length, max_candidate_length, contextual)


def write(directory, sequences=SEQUENCES, **columns):
    path = directory / "training.parquet"
    types = {"sequence_data": pl.List(pl.Int64)}
    pl.DataFrame({"sequence_data": sequences, **columns}, schema_overrides=types).write_parquet(path)
    return path


def flat_codes(items):
    return [int(code) for item in items for code in CODES[item // 10]]


def rows(batch, name):
    return [row.tolist() for row in batch.features[name].to_dense()]


def test_samples_are_the_files_rows(tmp_path):
    directory = tmp_path / "part[1]*"  # taken literally
    directory.mkdir()
    path = write(directory, user_id=["a", "b", "b", "c"], age=[0, 3, 1, 2])
    source = SIDSequenceSource(path, SIDS, spec(age=4))
    assert len(source) == 4
    assert source.spec == spec(age=4)
    for index, (items, age) in enumerate(zip(SEQUENCES, [0, 3, 1, 2], strict=True)):
        sample = source[index]
        assert sample.codes.flatten().tolist() == flat_codes(items)
        assert sample.target_item == items[-1]
        assert {name: ids.tolist() for name, ids in sample.contextual.items()} == {"age": [age]}
        assert sample.codes.dtype == sample.contextual["age"].dtype == np.int64
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"sample {index}: expected 0 to 3"):
            source[index]


def test_a_file_without_rows_has_no_samples(tmp_path):
    source = SIDSequenceSource(write(tmp_path, [], age=pl.Series([], dtype=pl.Int64)), SIDS, spec(age=4))
    assert len(source) == 0
    assert list(SequenceDataset(source, batch_size=2)) == []


item_lists = st.lists(st.sampled_from(SIDS.items.tolist()), min_size=1, max_size=12)


@settings(max_examples=25)  # each writes a file
@given(
    sequences=st.lists(item_lists, min_size=1, max_size=6),
    longest=st.integers(1, 8),
    candidates=st.integers(0, 4),
    batch_size=st.integers(1, 4),
    contextual=st.sampled_from([{}, {"age": 9}]),
)
def test_a_batch_has_the_codes_of_the_newest_items(
    sequences, longest, candidates, batch_size, contextual, tmp_path_factory
):
    path = write(tmp_path_factory.mktemp("data"), sequences, **dict.fromkeys(contextual, 8))
    source = SIDSequenceSource(path, SIDS, spec(longest, candidates, **contextual))
    kept = [items[-(longest + max(candidates, 1)) :] for items in sequences]
    found = []
    for batch in SequenceDataset(source, batch_size):
        assert batch.features.keys() == [*contextual, "history", "candidate"]
        assert (batch.batch_size, batch.num_hierarchies) == (batch_size, 3)
        assert all(
            max(batch.feature_lengths(name)) <= most for name, most in batch.feature_to_max_seqlen.items()
        )
        counts = (batch.num_tokens().tolist(), batch.num_loss_tokens().tolist(), batch.target_items.tolist())
        context = zip(*(rows(batch, name) for name in contextual), strict=True) if contextual else repeat(())
        found += zip(rows(batch, "history"), rows(batch, "candidate"), *counts, context, strict=False)
    for (history, candidate, tokens, loss_tokens, target, context), items in zip(found, kept, strict=False):
        num_candidates = min(candidates or len(items), len(items))
        assert history + candidate == flat_codes(items)
        assert len(candidate) == loss_tokens == 3 * num_candidates
        assert tokens == len(contextual) + len(history) + num_candidates * (1 + 3) - 1
        assert (target, list(context)) == (items[-1], [[8]] * len(contextual))
    padding = found[len(kept) :]
    assert len(found) == -(-len(kept) // batch_size) * batch_size
    assert all(row[:4] == ([], [], 0, 0) for row in padding)


def test_a_file_that_is_absent_damaged_or_does_not_fit_is_named(tmp_path):
    path = tmp_path / "training.parquet"
    for absent in (path, tmp_path):
        with pytest.raises(FileNotFoundError, match=f"{absent} does not exist"):
            SIDSequenceSource(absent, SIDS, spec())
    content = write(tmp_path).read_bytes()
    for damaged in (b"", b"PAR1", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} is malformed: "):
            SIDSequenceSource(path, SIDS, spec())
    for columns, missing in (({"sequence_data": [[10]]}, "age"), ({"age": [1]}, "sequence_data")):
        pl.DataFrame(columns).write_parquet(path)
        with pytest.raises(ValueError, match=f"{path} .*no column '{missing}'"):
            SIDSequenceSource(path, SIDS, spec(age=4))
    with pytest.raises(ValueError, match=r"codebook_sizes = \(4, 8\): expected 3"):
        SIDSequenceSource(path, SIDS, SIDDatasetSpec((4, 8), 5))
    with pytest.raises(ValueError, match=r"code .* in hierarchy 2: expected 0 to 1"):
        SIDSequenceSource(path, SIDS, SIDDatasetSpec((4, 8, 2), 5))


@pytest.mark.parametrize("max_candidate_length", [0, 1, 2])
def test_the_longest_sample_has_as_many_tokens_as_the_spec_says(max_candidate_length):
    dataset_spec = spec(5, max_candidate_length, age=3)
    source = RandomSIDSource(SIDS, dataset_spec, None, 1, seed=0)
    longest = SIDSample(CODES[: dataset_spec.max_items], 0, {"age": np.array([1])})
    batch = source.collate([longest, source[0]], 2)
    assert batch.num_tokens()[0] == dataset_spec.max_tokens >= batch.num_tokens()[1]
