"""What a sample costs to compute."""

from commons.perf_model.hstu_flops import HSTUFlops
from commons.perf_model.transformer_flops import TransformerConfig, transformer_flops

__all__ = ["HSTUFlops", "TransformerConfig", "transformer_flops"]
