import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from hstu.modules import HSTUConfig, HSTUFeatures, SampleMask, SequencePreprocessor, SequenceStructure

WIDTH = 3
NUM_BUCKETS = 7


@given(rows=st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=4), with_actions=st.booleans())
def test_order_of_tokens_and_positions(rows, with_actions):
    """The embedding of each token tells its feature, its row, and its place in it."""
    config = HSTUConfig(
        1, WIDTH, 1, 1, scaling_seqlen=1, num_position_buckets=NUM_BUCKETS, hidden_dropout=0.0
    )
    features = HSTUFeatures("item", "action" if with_actions else None, contextual=("b", "a"))
    module = SequencePreprocessor(config, features)
    in_a, in_b, items, drawn = zip(*rows, strict=True)
    lengths = {"a": in_a, "b": in_b, "item": items} | ({"action": items} if with_actions else {})
    candidates = list(map(min, items, drawn))
    embedded = {
        name: _embedded([(kind, row, place) for row, length in enumerate(of) for place in range(length)], of)
        for kind, (name, of) in enumerate(lengths.items())
    }
    expected, positions = [], []
    of_item = range(2, len(lengths))  # an item, and its action
    for row, (num_a, num_b, num_items, _) in enumerate(rows):
        tokens = [(1, row, place) for place in range(num_b)] + [(0, row, place) for place in range(num_a)]
        tokens += [(kind, row, place) for place in range(num_items) for kind in of_item]
        history_end = len(tokens) - len(of_item) * candidates[row]
        positions += range(history_end)
        positions += [history_end + token for _ in range(candidates[row]) for token in range(len(of_item))]
        expected += tokens
    counts = {f"features.{name}": np.array(row_lengths) for name, row_lengths in lengths.items()}
    got, structure = module(
        embedded, torch.tensor(candidates), counts | {"num_candidates": np.array(candidates)}
    )
    buckets = torch.tensor(positions, dtype=torch.int64).clamp(max=NUM_BUCKETS - 1)
    wanted = torch.tensor(expected).view(-1, WIDTH) + module.position_embedding(buckets)
    torch.testing.assert_close(got, wanted)
    assert structure.total_tokens == len(expected)


def _embedded(tokens, lengths):
    values = torch.tensor(tokens, dtype=torch.float32).view(-1, WIDTH)
    return JaggedTensor(values, lengths=torch.tensor(lengths, dtype=torch.int32))


def test_masks_of_a_structure():
    structure = SequenceStructure.of(
        contextual_lengths=torch.tensor([2, 0]),
        item_lengths=torch.tensor([3, 1]),
        candidate_lengths=torch.tensor([1, 0]),
        tokens_per_item=2,
        on_host=[[2, 0], [3, 1], [3, 1], [1, 0]],
    )
    assert structure.masks(is_causal=True, disable_contextual_mask=False) == [
        SampleMask(8, 2, 6, 2, True),
        SampleMask(2, 0, 2, 2, True),
    ]
    assert structure.masks(is_causal=False, disable_contextual_mask=True)[0] == SampleMask(8, 0, 6, 2, False)
    assert structure.last_item_tokens(torch.tensor([2, 1]), 3).tolist() == [4, 6, 8]


@pytest.mark.parametrize(
    ("actions", "candidates", "message"),
    [
        ([1, 3], [0, 0], "row 1 has 2 items and 3 actions"),
        ([1, 2], [2, 0], "row 0 has 2 candidates among its 1"),
    ],
)
def test_disagreeing_lengths_are_named(actions, candidates, message):
    with pytest.raises(ValueError, match=message):
        SequenceStructure.of(
            torch.tensor([0, 0]),
            torch.tensor([1, 2]),
            torch.tensor(candidates),
            tokens_per_item=2,
            on_host=[[0, 0], [1, 2], actions, candidates],
        )
