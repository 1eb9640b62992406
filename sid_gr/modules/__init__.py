"""Building blocks of the SID-GR model."""

from sid_gr.modules.attention import JaggedCausalAttention
from sid_gr.modules.beam_attention import BeamAttention
from sid_gr.modules.decoder import Decoder, DecoderConfig
from sid_gr.modules.token_layout import TokenLayout

__all__ = ["BeamAttention", "Decoder", "DecoderConfig", "JaggedCausalAttention", "TokenLayout"]
