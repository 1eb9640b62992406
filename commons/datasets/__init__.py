"""Samples, batches, and datasets: random data, MovieLens, KuaiRand, semantic IDs, and your own."""

from . import kuairand, movielens  # noqa: F401  registers their names
from .benchmark_args import BenchmarkDatasetArgs, FeatureArgs, RandomDistribution
from .embedding_args import DynamicEmbeddingArgs, EmbeddingArgs
from .hstu_batch import HSTUBatch, HSTUSource, SequenceDatasetSpec, check_ids
from .item_sids import ItemSIDs
from .random_source import RandomSource
from .retrieval_source import RetrievalSource
from .sequence_dataset import SequenceDataset
from .sid_batch import SIDBatch, SIDDatasetSpec, SIDSource
from .sid_random_source import RandomSIDSource, random_history_lengths, random_item_sids
from .sid_sequences import SIDSequenceSource
from .user_sequence_source import UserSequenceSource
from .user_sequences import DatasetFactory, SequencesMeta, UserDataset, UserSequences, register_dataset

__all__ = [
    "BenchmarkDatasetArgs",
    "DatasetFactory",
    "DynamicEmbeddingArgs",
    "EmbeddingArgs",
    "FeatureArgs",
    "HSTUBatch",
    "HSTUSource",
    "ItemSIDs",
    "RandomDistribution",
    "RandomSIDSource",
    "RandomSource",
    "RetrievalSource",
    "SIDBatch",
    "SIDDatasetSpec",
    "SIDSequenceSource",
    "SIDSource",
    "SequenceDataset",
    "SequenceDatasetSpec",
    "SequencesMeta",
    "UserDataset",
    "UserSequenceSource",
    "UserSequences",
    "check_ids",
    "random_history_lengths",
    "random_item_sids",
    "register_dataset",
]
