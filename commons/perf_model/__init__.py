"""Cost models of samples: FLOPs, and times fitted to measured steps."""

from commons.perf_model.cost import Cost
from commons.perf_model.hstu_flops import HSTUFlops
from commons.perf_model.transformer_flops import TransformerConfig, transformer_flops, transformer_work

__all__ = ["Cost", "HSTUFlops", "TransformerConfig", "transformer_flops", "transformer_work"]
