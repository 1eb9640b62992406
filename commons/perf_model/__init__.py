"""Cost models of samples: FLOPs and measured times."""

from commons.perf_model.hstu_flops import HSTUFlops
from commons.perf_model.measured_cost import MeasuredCost
from commons.perf_model.transformer_flops import TransformerConfig, transformer_flops

__all__ = ["HSTUFlops", "MeasuredCost", "TransformerConfig", "transformer_flops"]
