"""The HSTU models."""

from hstu.models.embedding_tables import EmbeddingTable
from hstu.models.hstu_config import HSTUConfig, full_sequence_length
from hstu.models.hstu_encoder import HSTUFeatures
from hstu.models.ranking import HSTURanking, RankingHeadConfig, RankingOutput
from hstu.models.retrieval import HSTURetrieval, RetrievalConfig, RetrievalOutput

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
