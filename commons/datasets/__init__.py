"""Batches, random data, and sequence data from disk."""

from commons.datasets.benchmark_args import BenchmarkDatasetArgs, FeatureArgs
from commons.datasets.bucket_sampler import BucketSampler
from commons.datasets.embedding_args import DynamicEmbeddingArgs, EmbeddingArgs
from commons.datasets.hstu_batch import HSTUBatch
from commons.datasets.hstu_sample import HSTUSample
from commons.datasets.hstu_source import HSTUSource, collate_hstu_batch
from commons.datasets.id_check import check_ids
from commons.datasets.item_sids import ItemSIDs
from commons.datasets.random_distribution import RandomDistribution
from commons.datasets.random_source import RandomSource
from commons.datasets.retrieval_source import RetrievalSource
from commons.datasets.sample_source import PerEpochSource, SampleSource
from commons.datasets.sequence_dataset import SequenceDataset
from commons.datasets.sequence_dataset_spec import SequenceDatasetSpec
from commons.datasets.sid_batch import SIDBatch
from commons.datasets.sid_random_source import (
    RandomSIDSource,
    random_history_lengths,
    random_item_sids,
)
from commons.datasets.sid_sequences import SIDSequenceSource
from commons.datasets.sid_source import SIDSample, SIDSource
from commons.datasets.sid_spec import SIDDatasetSpec
from commons.datasets.user_sequence_source import MovieLensSource, UserSequenceSource
from commons.datasets.user_sequences import UserSequences

__all__ = [
    "BenchmarkDatasetArgs",
    "BucketSampler",
    "DynamicEmbeddingArgs",
    "EmbeddingArgs",
    "FeatureArgs",
    "HSTUBatch",
    "HSTUSample",
    "HSTUSource",
    "ItemSIDs",
    "MovieLensSource",
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
    "UserSequenceSource",
    "UserSequences",
    "check_ids",
    "collate_hstu_batch",
    "random_history_lengths",
    "random_item_sids",
]
