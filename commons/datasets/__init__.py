"""Samples, batches and datasets: random, MovieLens, KuaiRand, semantic IDs, and your own."""

from commons.datasets import kuairand, movielens  # noqa: F401  registers their names
from commons.datasets.benchmark_args import BenchmarkDatasetArgs, FeatureArgs
from commons.datasets.bucket_sampler import BucketSampler
from commons.datasets.embedding_args import DynamicEmbeddingArgs, EmbeddingArgs
from commons.datasets.hstu_batch import (
    HSTUBatch,
    HSTUSample,
    HSTUSource,
    SequenceDatasetSpec,
    check_ids,
    collate_hstu_batch,
)
from commons.datasets.item_sids import ItemSIDs
from commons.datasets.random_distribution import RandomDistribution
from commons.datasets.random_source import RandomSource
from commons.datasets.retrieval_source import RetrievalSource
from commons.datasets.sample_source import PerEpochSource, SampleSource
from commons.datasets.sequence_dataset import SequenceDataset
from commons.datasets.sid_batch import SIDBatch, SIDDatasetSpec, SIDSample, SIDSource
from commons.datasets.sid_random_source import RandomSIDSource, random_history_lengths, random_item_sids
from commons.datasets.sid_sequences import SIDSequenceSource
from commons.datasets.user_sequence_source import UserSequenceSource
from commons.datasets.user_sequences import (
    DatasetFactory,
    SequencesMeta,
    UserDataset,
    UserSequences,
    register_dataset,
)

__all__ = [
    "BenchmarkDatasetArgs",
    "BucketSampler",
    "DatasetFactory",
    "DynamicEmbeddingArgs",
    "EmbeddingArgs",
    "FeatureArgs",
    "HSTUBatch",
    "HSTUSample",
    "HSTUSource",
    "ItemSIDs",
    "PerEpochSource",
    "RandomDistribution",
    "RandomSIDSource",
    "RandomSource",
    "RetrievalSource",
    "SIDBatch",
    "SIDDatasetSpec",
    "SIDSample",
    "SIDSequenceSource",
    "SIDSource",
    "SampleSource",
    "SequenceDataset",
    "SequenceDatasetSpec",
    "SequencesMeta",
    "UserDataset",
    "UserSequenceSource",
    "UserSequences",
    "check_ids",
    "collate_hstu_batch",
    "random_history_lengths",
    "random_item_sids",
    "register_dataset",
]
