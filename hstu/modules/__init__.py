"""Building blocks of the HSTU models."""

from hstu.modules.attention import jagged_hstu_attention
from hstu.modules.attention_backend import batch_attention, piece_attention
from hstu.modules.attention_mask import SampleMask
from hstu.modules.attention_tiles import AttentionTiles
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures, full_sequence_length
from hstu.modules.hstu_layer import HSTULayer
from hstu.modules.prediction_head import PredictionHead, RankingHeadConfig
from hstu.modules.sequence_preprocessor import SequencePreprocessor
from hstu.modules.sequence_structure import SequenceStructure

__all__ = [
    "AttentionTiles",
    "HSTUConfig",
    "HSTUFeatures",
    "HSTULayer",
    "PredictionHead",
    "RankingHeadConfig",
    "SampleMask",
    "SequencePreprocessor",
    "SequenceStructure",
    "batch_attention",
    "full_sequence_length",
    "jagged_hstu_attention",
    "piece_attention",
]
