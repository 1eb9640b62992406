import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch import BaseBatch
from tests.commons.sequence_batch.internals import Schema
from tests.drawn_batches import draw_batch, sample_contents
from tests.few_examples import few_examples
from tests.own_memory import check_own_memory

LABELS = st.sampled_from(["keyed", "dense", "flat", "none"])


@few_examples
@given(data=st.data(), seed=st.integers(0, 10**6), labels=LABELS)
def test_selected_rows_are_those_rows(data, seed, labels):
    num_real = data.draw(st.integers(0, 6))
    batch_size = max(num_real + data.draw(st.integers(0, 2)), 1)
    batch = draw_batch(np.random.default_rng(seed), 100, batch_size, num_real, labels)
    contents = sample_contents(batch)
    indices = data.draw(st.lists(st.integers(0, num_real - 1), max_size=9)) if num_real else []
    selected = batch.index_select(torch.tensor(indices, dtype=torch.int64))
    assert sample_contents(selected) == [contents[i] for i in indices]
    assert selected.batch_size == max(len(indices), 1)
    assert selected.actual_batch_size == len(indices)
    assert selected.shared is batch.shared
    check_own_memory(selected, batch)
    assert Schema.of(selected.per_sample_fields()) == Schema.of(batch.per_sample_fields())


def _features(batch_size: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a"], torch.arange(batch_size), lengths=torch.ones(batch_size, dtype=torch.int64)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 3, "actual_batch_size": 4}, "actual_batch_size is 4"),
        ({"batch_size": 3, "labels": torch.zeros(4)}, "labels has 4 rows, expected batch_size = 3"),
        ({"batch_size": 3, "labels": torch.tensor(1.0)}, r"labels is a tensor without rows"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BaseBatch(features=_features(max(arguments["batch_size"], 1)), feature_to_max_seqlen={}, **arguments)


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([3], ValueError, "from 3 to 3, expected 0 to 2"),
        ([2, 0], ValueError, "padding row before a real row"),
        (torch.tensor([True, False, True]), TypeError, "expected a list of row numbers"),
        (torch.tensor([0.5]), TypeError, "expected a list of row numbers"),
        ([[0, 1]], TypeError, "expected a list of row numbers"),
    ],
)
def test_bad_indices_are_refused(indices, error, message):
    batch = BaseBatch(features=_features(3), batch_size=3, feature_to_max_seqlen={}, actual_batch_size=2)
    with pytest.raises(error, match=message):
        batch.index_select(indices)


def test_loss_tokens_leave_padding_out():
    rng = np.random.default_rng(0)
    assert draw_batch(rng, 0, 5, 3, "none").num_loss_tokens().tolist() == [1, 1, 1, 0, 0]
    assert draw_batch(rng, 0, 5, 3, "dense").num_loss_tokens().tolist() == [2, 2, 2, 0, 0]
    assert draw_batch(rng, 0, 5, 3, "flat").num_loss_tokens().tolist() == [3, 3, 3, 0, 0]
    keyed = draw_batch(rng, 0, 5, 3, "keyed")
    assert keyed.num_loss_tokens().tolist() == keyed.labels.lengths().tolist()


def _incomplete(labels: torch.Tensor, rows: int = 8, real: int = 4) -> BaseBatch:
    lengths = torch.cat([torch.ones(real), torch.zeros(rows - real)]).int()
    features = KeyedJaggedTensor(["item"], torch.zeros(real, dtype=torch.int64), lengths=lengths)
    return BaseBatch(features, rows, {"item": 1}, labels=labels, actual_batch_size=real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("num_labels", [4, 8, 24])
def test_flat_labels_without_padding_are_refused(num_labels, dtype):
    told = rf"labels has {num_labels} elements .*those of the 4 samples.*\[8, {num_labels // 4}\]"
    with pytest.raises(ValueError, match=told):
        _incomplete(torch.arange(num_labels).remainder(3).to(dtype))
    _incomplete(torch.arange(num_labels).view(4, -1).repeat(2, 1))  # with padding, in one way


@pytest.mark.parametrize("padding", [0.0, -100.0])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_flat_labels_with_padding_travel(padding, width):
    labels = torch.cat([torch.arange(4.0 * width), torch.full((4 * width,), padding)])
    selected = _incomplete(labels).index_select([3, 1])
    assert selected.labels.view(2, width).tolist() == labels.view(8, width)[[3, 1]].tolist()
