"""The HSTU models."""

from hstu.models.embedding_tables import EmbeddingTable
from hstu.models.ranking import HSTURanking, RankingOutput
from hstu.models.retrieval import HSTURetrieval, RetrievalConfig, RetrievalOutput
from hstu.modules import HSTUConfig, HSTUFeatures, RankingHeadConfig, full_sequence_length

__all__ = [
    "EmbeddingTable",
    "HSTUConfig",
    "HSTUFeatures",
    "HSTURanking",
    "HSTURetrieval",
    "RankingHeadConfig",
    "RankingOutput",
    "RetrievalConfig",
    "RetrievalOutput",
    "full_sequence_length",
]
