"""The benchmark of lookups: its collection and its streams."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.lookup_streams import LENGTHS, ROWS, SHARED, STREAMS, draw_batches
from tests.benchmarks.sharded_lookups import lookups_and_trained_tables


@pytest.mark.parametrize(
    ("lengths", "ids"),
    [
        ([[2, 0, 3, 1, 1, 1], [1, 2, 0, 1, 1, 1]], [[7, 7, 0, 7, 10, 3, 3, 3], [7, 2, 2, 3, 4, 3]]),
        ([[0, 0, 1, 1], [2, 0, 0, 0]], [[5, 5], [5, 5]]),  # a feature without ids
    ],
)
def test_unique_lookups_give_the_same_embeddings_and_gradients(pools, lengths, ids):
    for all_ids, unique_ids in pools(2).run(lookups_and_trained_tables, lengths, ids):
        np.testing.assert_array_equal(unique_ids[0], all_ids[0])
        assert unique_ids[1] == all_ids[1]
        np.testing.assert_allclose(unique_ids[2], all_ids[2], rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("stream", STREAMS)
def test_the_samples_of_a_user_share_the_ids_that_the_stream_claims(stream, lengths):
    samples = [sample for rank in (0, 1) for sample in _samples(stream, lengths, rank)]
    per_user = STREAMS[stream].samples_per_user
    by_user: dict[int, list[np.ndarray]] = {}
    for user, items in samples:
        by_user.setdefault(user, []).append(items)
    assert {len(rows) for rows in by_user.values()} == {per_user}
    users_of_item = Counter(item for rows in by_user.values() for item in set(np.concatenate(rows)))
    assert set(users_of_item.values()) == {1}
    for rows in by_user.values():
        [num_items] = {len(items) for items in rows}
        samples_of_item = Counter(np.concatenate(rows).tolist())
        shared = round(SHARED * num_items)
        own = per_user * (num_items - shared)
        assert sorted(samples_of_item.values()) == sorted([per_user] * shared + [1] * own)


def test_users_stay_together_until_they_are_shuffled():
    in_order = [user for user, _ in _samples("user-major", "uniform in [20, 200]", 0)]
    assert in_order == [user for user in in_order[::4] for _ in range(4)]
    shuffled = {user for user, _ in _samples("shuffled", "uniform in [20, 200]", 0)}
    assert shuffled != set(in_order) and len(shuffled) > ROWS // 4


def _samples(stream: str, lengths: str, rank: int) -> list[tuple[int, np.ndarray]]:
    """The user and the items of each sample that a rank of two loads first."""
    [batch] = draw_batches(STREAMS[stream], lengths, 1, rank, 2)
    users, items = (batch.features[name].to_dense() for name in ("user_id", "item"))
    return [(int(user), sample.numpy()) for [user], sample in zip(users, items, strict=True)]
