import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import ItemSIDs, SequenceDataset, SIDDatasetSpec, SIDSequenceSource
from tests.few_examples import few_examples

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


def test_samples_are_the_files_rows(tmp_path):
    directory = tmp_path / "part[1]*"  # taken literally
    directory.mkdir()
    path = write(directory, user_id=["a", "b", "b", "c"], age=[0, 3, 1, 2])
    source = SIDSequenceSource(path, SIDS, spec(age=4))
    assert len(source) == 4
    for index, (items, age) in enumerate(zip(SEQUENCES, [0, 3, 1, 2], strict=True)):
        sample = source[index]
        assert sample.codes.flatten().tolist() == flat_codes(items)
        assert sample.target_item == items[-1]
        assert {name: ids.tolist() for name, ids in sample.contextual.items()} == {"age": [age]}
        assert sample.codes.dtype == sample.contextual["age"].dtype == np.int64


def test_a_file_without_rows_has_no_samples(tmp_path):
    assert len(SIDSequenceSource(write(tmp_path, []), SIDS, spec())) == 0


item_lists = st.lists(st.sampled_from(SIDS.items.tolist()), min_size=1, max_size=12)


@few_examples  # each writes a file
@given(
    sequences=st.lists(item_lists, min_size=1, max_size=6),
    longest=st.integers(1, 8),
    candidates=st.integers(0, 4),
    batch_size=st.integers(1, 4),
)
def test_a_batch_has_the_codes_of_the_newest_items(
    sequences, longest, candidates, batch_size, tmp_path_factory
):
    path = write(tmp_path_factory.mktemp("data"), sequences, age=[8] * len(sequences))
    source = SIDSequenceSource(path, SIDS, spec(longest, candidates, age=9))
    kept = [items[-(longest + max(candidates, 1)) :] for items in sequences]
    found = []
    for batch in SequenceDataset(source, batch_size):
        assert batch.features.keys() == ["age", "history", "candidate"]
        assert (batch.batch_size, batch.num_hierarchies) == (batch_size, 3)
        for name, most in batch.feature_to_max_seqlen.items():
            assert max(batch.feature_lengths(name)) <= most
        counts = (batch.num_tokens().tolist(), batch.num_loss_tokens().tolist(), batch.target_items.tolist())
        ids = ([row.tolist() for row in of.to_dense()] for of in batch.features.to_dict().values())
        found += zip(*ids, *counts, strict=True)
    for (age, history, candidate, tokens, loss_tokens, target), items in zip(found, kept, strict=False):
        num_candidates = min(candidates or len(items), len(items))
        assert history + candidate == flat_codes(items)
        assert len(candidate) == loss_tokens == 3 * num_candidates
        assert tokens == 1 + len(history) + num_candidates * (1 + 3) - 1
        assert (tokens == source.spec.max_tokens) == (len(items) == source.spec.max_items)
        assert (target, age) == (items[-1], [8])
    padding = found[len(kept) :]
    assert len(found) == -(-len(kept) // batch_size) * batch_size
    assert all(row[:5] == ([], [], [], 0, 0) for row in padding)


def test_a_file_that_is_absent_damaged_or_does_not_fit_is_named(tmp_path):
    path = tmp_path / "training.parquet"
    with pytest.raises(FileNotFoundError, match=f"{path} does not exist"):
        SIDSequenceSource(path, SIDS, spec())
    content = write(tmp_path).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{path} is malformed: "):
        SIDSequenceSource(path, SIDS, spec())
    for sequences, columns, found in (
        ([[10]], {}, "it has no column 'age'"),
        ([[10]], {"age": [4]}, "row 0: feature 'age' has id 4"),
        ([[10], [20, 7]], {"age": [0, 0]}, "row 1: item 7 has no semantic ID"),
    ):
        write(tmp_path, sequences, **columns)
        with pytest.raises(ValueError, match=f"{path}.*{found}"):
            SIDSequenceSource(path, SIDS, spec(age=4))
    with pytest.raises(ValueError, match=r"code .* in hierarchy 2: expected 0 to 1"):
        SIDSequenceSource(path, SIDS, SIDDatasetSpec((4, 8, 2), 5))
