import json
import re
from itertools import repeat

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import RandomSIDSource, SequenceDataset, SIDSample
from commons.datasets.item_sids import ItemSIDs
from commons.datasets.sid_batch import SIDDatasetSpec
from commons.datasets.sid_sequences import SIDSequenceSource

SIZES = (4, 8, 16)
NUM_ITEMS = 20
CODES = np.random.default_rng(0).integers(0, SIZES, (NUM_ITEMS, len(SIZES)))
SEQUENCES = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [7, 8]]


def spec(max_history_length=5, max_candidate_length=1, **contextual):
    return SIDDatasetSpec(SIZES, max_history_length, max_candidate_length, contextual)


@pytest.fixture(scope="module")
def sids(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapping") / "sids.pt"
    torch.save(torch.from_numpy(CODES.T.copy()), path)
    return ItemSIDs.load(path, SIZES)


def write(directory, sequences=SEQUENCES, dtype=pl.Int64, **columns):
    path = directory / "training.parquet"
    types = {"sequence_data": pl.List(dtype)}
    pl.DataFrame({"sequence_data": sequences, **columns}, schema_overrides=types).write_parquet(path)
    return path


def flat_codes(items):
    return [int(code) for item in items for code in CODES[item]]


def rows(batch, name):
    return [row.tolist() for row in batch.features[name].to_dense()]


def test_samples_are_the_files_rows(sids, tmp_path):
    path = write(tmp_path, user_id=["a", "b", "b", "c"], age=[0, 3, 1, 2])
    source = SIDSequenceSource(path, sids, spec(age=4))
    assert len(source) == 4
    assert source.spec == spec(age=4)
    for index, (items, age) in enumerate(zip(SEQUENCES, [0, 3, 1, 2], strict=True)):
        sample = source[index]
        np.testing.assert_array_equal(sample.codes, CODES[items])
        assert sample.target_item == items[-1]
        assert {name: ids.tolist() for name, ids in sample.contextual.items()} == {"age": [age]}
        assert sample.codes.dtype == sample.contextual["age"].dtype == np.int64
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"sample {index}: expected 0 to 3"):
            source[index]


@pytest.mark.parametrize("dtype", [pl.UInt8, pl.Int32, pl.UInt64])
def test_items_and_contextual_ids_may_be_any_integers(dtype, sids, tmp_path):
    path = write(tmp_path, dtype=dtype, age=pl.Series([0, 3, 1, 2], dtype=dtype))
    sample = SIDSequenceSource(path, sids, spec(age=4))[2]
    np.testing.assert_array_equal(sample.codes, CODES[[6, 5, 3]])
    assert sample.contextual["age"].tolist() == [1]
    assert sample.contextual["age"].dtype == np.int64


def test_a_json_mapping_of_items_that_are_not_contiguous(tmp_path):
    mapping = tmp_path / "sids.json"
    mapping.write_text(json.dumps({"700": [3, 7, 15], "20": [0, 1, 2]}))
    source = SIDSequenceSource(write(tmp_path, [[700, 20, 700]]), ItemSIDs.load(mapping, SIZES), spec())
    assert source[0].codes.tolist() == [[3, 7, 15], [0, 1, 2], [3, 7, 15]]
    assert source[0].target_item == 700


def test_a_file_without_rows_has_no_samples(sids, tmp_path):
    source = SIDSequenceSource(write(tmp_path, [], age=pl.Series([], dtype=pl.Int64)), sids, spec(age=4))
    assert len(source) == 0
    assert list(SequenceDataset(source, batch_size=2)) == []


def test_a_path_with_wildcards_is_taken_literally(sids, tmp_path):
    directory = tmp_path / "part[1]*"
    directory.mkdir()
    assert len(SIDSequenceSource(write(directory), sids, spec())) == 4


item_lists = st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=12)


@settings(max_examples=25)
@given(
    sequences=st.lists(item_lists, min_size=1, max_size=6),
    longest=st.integers(1, 8),
    candidates=st.integers(0, 4),
    batch_size=st.integers(1, 4),
    contextual=st.sampled_from([{}, {"age": 9}]),
)
def test_a_batch_has_the_codes_of_the_newest_items(
    sequences, longest, candidates, batch_size, contextual, sids, tmp_path_factory
):
    path = write(tmp_path_factory.mktemp("data"), sequences, **dict.fromkeys(contextual, 8))
    source = SIDSequenceSource(path, sids, spec(longest, candidates, **contextual))
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


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"sequence_data": [[1, 2]]}, " is malformed: it has no column 'age'; it has .*sequence_data"),
        (
            {"user_id": ["a"], "age": [1]},
            " is malformed: it has no column 'sequence_data'; it has .*user_id.*age",
        ),
        ({"sequence_data": [3], "age": [1]}, " .*: column 'sequence_data' is Int64: expected lists of"),
        ({"sequence_data": [[1.0]], "age": [1]}, r" .*: column 'sequence_data' is List\(Float64\): expect"),
        ({"sequence_data": [["1"]], "age": [1]}, r" .*: column 'sequence_data' is List\(String\): expected"),
        ({"sequence_data": [[1]], "age": ["x"]}, " .*: column 'age' is String: expected integers"),
        ({"sequence_data": [[1]], "age": [True]}, " .*: column 'age' is Boolean: expected integers"),
        ({"sequence_data": [[1], None], "age": [1, 1]}, " .*: row 1: column 'sequence_data' is null"),
        ({"sequence_data": [[1], [1, None]], "age": [1, 1]}, " .*: row 1: feature 'sequence_data' has id nu"),
        ({"sequence_data": [[1], []], "age": [1, 1]}, " .*: row 1: column 'sequence_data' is empty: exp"),
        ({"sequence_data": [[1], [4, 20, 30]], "age": [1, 1]}, r", row 1: item 20 has no .* \(20 items\)"),
        ({"sequence_data": [[-1]], "age": [1]}, ", row 0: item -1 has no semantic ID"),
        ({"sequence_data": [[1], [2]], "age": [1, None]}, " .*: row 1: column 'age' is null"),
        ({"sequence_data": [[1], [2]], "age": [3, 4]}, " .*: row 1: feature 'age' has id 4: expected 0 to 3"),
        ({"sequence_data": [[1], [2]], "age": [-1, 4]}, " .*: row 0: feature 'age' has id -1: expected 0 to"),
    ],
)
def test_malformed_columns_are_named(columns, message, sids, tmp_path):
    path = tmp_path / "training.parquet"
    pl.DataFrame(columns).write_parquet(path)
    with pytest.raises(ValueError, match=re.escape(str(path)) + message):
        SIDSequenceSource(path, sids, spec(age=4))


def test_an_item_that_int64_does_not_hold_is_named(sids, tmp_path):
    path = write(tmp_path, [[2**64 - 1]], dtype=pl.UInt64)
    with pytest.raises(
        ValueError, match=r"training.parquet .*: row 0: feature 'sequence_data' has id 18446744073709551615"
    ):
        SIDSequenceSource(path, sids, spec())


def test_a_file_that_is_absent_or_damaged_is_named(sids, tmp_path):
    path = tmp_path / "training.parquet"
    for absent in (path, tmp_path):
        with pytest.raises(FileNotFoundError, match=re.escape(f"{absent} does not exist")):
            SIDSequenceSource(absent, sids, spec())
    content = write(tmp_path).read_bytes()
    for damaged in (b"", b"PAR1", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(f"{path} is malformed: ")):
            SIDSequenceSource(path, sids, spec())


def test_a_mapping_of_other_codebooks_is_an_error(sids, tmp_path):
    path = write(tmp_path)
    with pytest.raises(ValueError, match=r"codebook_sizes = \(4, 8\): expected 3, as items have 3 codes"):
        SIDSequenceSource(path, sids, SIDDatasetSpec((4, 8), 5))
    with pytest.raises(ValueError, match=r"code .* in hierarchy 2: expected 0 to 1, as its codebook has 2"):
        SIDSequenceSource(path, sids, SIDDatasetSpec((4, 8, 2), 5))


@pytest.mark.parametrize("max_candidate_length", [0, 1, 2])
def test_the_longest_sample_has_as_many_tokens_as_the_spec_says(max_candidate_length):
    dataset_spec = spec(5, max_candidate_length, age=3)
    sids = ItemSIDs(np.arange(NUM_ITEMS), CODES)
    source = RandomSIDSource(sids, dataset_spec, None, 1, seed=0)
    longest = SIDSample(CODES[: dataset_spec.max_items], 0, {"age": np.array([1])})
    batch = source.collate([longest, source[0]], 2)
    assert batch.num_tokens()[0] == dataset_spec.max_tokens >= batch.num_tokens()[1]
