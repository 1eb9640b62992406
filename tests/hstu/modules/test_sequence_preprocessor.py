import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from hstu.modules import SampleMask, SequencePreprocessor, SequenceStructure

WIDTH = 3
NUM_BUCKETS = 7


def preprocessor(with_actions: bool) -> SequencePreprocessor:
    return SequencePreprocessor(
        contextual_feature_names=["b", "a"],
        item_feature_name="item",
        action_feature_name="action" if with_actions else None,
        contextual_embedding_dim=WIDTH,
        item_embedding_dim=WIDTH,
        hidden_size=WIDTH,
        num_position_buckets=NUM_BUCKETS,
    )


@given(rows=st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=4), with_actions=st.booleans())
def test_order_of_tokens_and_positions(rows, with_actions):
    """Every embedding's first entry tells the feature, the second the row, the third the place in it."""
    module = preprocessor(with_actions)
    kinds = {"a": 0, "b": 1, "item": 2, "action": 3}
    lengths = {
        name: [row[min(kinds[name], 2)] for row in rows]
        for name in (*kinds,)
        if with_actions or name != "action"
    }
    embedded = {
        name: JaggedTensor(
            torch.tensor(
                [
                    [kinds[name], row, place]
                    for row, length in enumerate(row_lengths)
                    for place in range(length)
                ],
                dtype=torch.float32,
            ).view(-1, WIDTH),
            lengths=torch.tensor(row_lengths, dtype=torch.int32),
        )
        for name, row_lengths in lengths.items()
    }
    candidates = [min(row[2], row[3]) for row in rows]
    expected, positions = [], []
    for row, (num_a, num_b, num_items, _) in enumerate(rows):
        tokens = [[1, row, place] for place in range(num_b)] + [[0, row, place] for place in range(num_a)]
        for place in range(num_items):
            tokens.append([2, row, place])
            tokens += [[3, row, place]] if with_actions else []
        per_candidate = 2 if with_actions else 1
        history_end = len(tokens) - per_candidate * candidates[row]
        positions += range(history_end)
        positions += [history_end + token for _ in range(candidates[row]) for token in range(per_candidate)]
        expected += tokens
    counts = {f"features.{name}": np.array(row_lengths) for name, row_lengths in lengths.items()}
    counts["num_candidates"] = np.array(candidates)
    got, structure = module(embedded, torch.tensor(candidates), counts)
    buckets = torch.tensor(positions, dtype=torch.int64).clamp(max=NUM_BUCKETS - 1)
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float32).view(-1, WIDTH) + module.position_embedding(buckets)
    )
    assert structure.total_tokens == len(expected)


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
