"""Trains equal sharded tables, looked up with and without duplicates."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.lookup_model import UniqueLookups
from commons.training import OptimizerArgs, shard_model

NUM_IDS, WIDTH, FEATURES = 11, 4, ["item", "user_id"]


def lookups_and_trained_tables(lengths, ids):
    """Returns, with all ids and with unique ones: a rank's embeddings, their lengths, and all rows of the
    tables after a step of SGD.

    Args:
        lengths: of each rank the lengths of its rows, feature by feature.
        ids: of each rank.
    """
    rank = dist.get_rank()
    features = _features(torch.tensor(ids[rank], dtype=torch.int64), torch.tensor(lengths[rank]))
    everything = _features(torch.arange(NUM_IDS).repeat(len(FEATURES)), torch.tensor([NUM_IDS, NUM_IDS]))
    results = []
    for unique in (False, True):
        torch.manual_seed(0)
        collection = _collection()
        model = nn.ModuleList([UniqueLookups(collection) if unique else collection])
        sharded, _ = shard_model(model, OptimizerArgs("sgd", 0.1), torch.device("cpu"))
        [lookups] = sharded.module
        embedded = _by_feature(lookups(features))
        values = torch.cat([rows.values() for rows in embedded])
        (values * torch.arange(values.numel()).reshape(values.shape)).sum().backward()
        tables = torch.cat([rows.values() for rows in _by_feature(lookups(everything))])
        lengths_after = [rows.lengths().tolist() for rows in embedded]
        results.append((values.detach().numpy(), lengths_after, tables.detach().numpy()))
    return results


def _features(ids, lengths):
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def _by_feature(embedded):
    return [embedded[name] for name in FEATURES]


def _collection():
    return EmbeddingCollection(
        [
            EmbeddingConfig(
                name=f"{name}_table", embedding_dim=WIDTH, num_embeddings=NUM_IDS, feature_names=[name]
            )
            for name in FEATURES
        ]
    )
