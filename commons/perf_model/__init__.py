"""What a sample costs to compute."""

from commons.perf_model.decoder_flops import DecoderFlops
from commons.perf_model.hstu_flops import HSTUFlops

__all__ = ["DecoderFlops", "HSTUFlops"]
