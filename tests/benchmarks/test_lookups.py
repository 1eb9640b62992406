"""The benchmark of lookups: its collection and its streams."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from benchmarks.lookup_model import UniqueLookups
from benchmarks.lookup_streams import LENGTHS, SHARED, STREAMS, draw_batches
from commons.training import OptimizerArgs, shard_model
from tests.on_ranks import on_ranks

NUM_IDS, FEATURES = 11, ["item", "user_id"]


def _features(ids, lengths) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, ids, lengths=torch.tensor(lengths))


def _train(unique: bool, features: KeyedJaggedTensor) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    """Returns this rank's embeddings, their lengths, and all rows of the tables after a step of SGD."""
    torch.manual_seed(0)
    tables = [EmbeddingConfig(NUM_IDS, 4, f"{name}_table", feature_names=[name]) for name in FEATURES]
    collection = EmbeddingCollection(tables)
    model = nn.ModuleList([UniqueLookups(collection) if unique else collection])
    sharded, _ = shard_model(model, OptimizerArgs("sgd", 0.1), torch.device("cpu"))
    [lookups] = sharded.module

    def look_up(features):
        found = lookups(features)
        rows = [found[name] for name in FEATURES]
        return torch.cat([each.values() for each in rows]), [each.lengths().tolist() for each in rows]

    values, lengths = look_up(features)
    (values * torch.arange(values.numel()).reshape(values.shape)).sum().backward()
    everything = _features(torch.arange(NUM_IDS).repeat(len(FEATURES)), [NUM_IDS, NUM_IDS])
    return values.detach(), lengths, look_up(everything)[0].detach()


@pytest.mark.parametrize(
    ("lengths", "ids"),
    [
        ([[2, 0, 3, 1, 1, 1], [1, 2, 0, 1, 1, 1]], [[7, 7, 0, 7, 10, 3, 3, 3], [7, 2, 2, 3, 4, 3]]),
        ([[0, 0, 1, 1], [2, 0, 0, 0]], [[5, 5], [5, 5]]),  # a feature without ids
    ],
)
@on_ranks(2)
def test_unique_lookups_give_the_same_embeddings_and_gradients(lengths, ids):
    rank = dist.get_rank()
    features = _features(torch.tensor(ids[rank], dtype=torch.int64), lengths[rank])
    plain, unique = (_train(unique, features) for unique in (False, True))
    assert torch.equal(unique[0], plain[0]) and unique[1] == plain[1]
    torch.testing.assert_close(unique[2], plain[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("stream", STREAMS)
def test_the_samples_of_a_user_share_the_ids_that_the_stream_claims(stream, lengths):
    per_user = STREAMS[stream].samples_per_user
    by_user: dict[int, list[np.ndarray]] = {}
    for rank in (0, 1):
        [batch] = draw_batches(STREAMS[stream], lengths, 1, rank, 2)
        users, items = (batch.features[name].to_dense() for name in ("user_id", "item"))
        for [user], sample in zip(users, items, strict=True):
            by_user.setdefault(int(user), []).append(sample.numpy())
    for rows in by_user.values():
        [num_items] = {len(items) for items in rows}
        shared = round(SHARED * num_items)
        expected = [per_user] * shared + [1] * per_user * (num_items - shared)
        assert len(rows) == per_user
        assert sorted(Counter(np.concatenate(rows).tolist()).values(), reverse=True) == expected
    items_of_users = [set(np.concatenate(rows)) for rows in by_user.values()]
    assert len(set().union(*items_of_users)) == sum(map(len, items_of_users))
