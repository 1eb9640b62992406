"""Cost models of samples: FLOPs, and times fitted to measured steps."""

from .cost import Cost
from .hstu_flops import HSTUFlops
from .transformer_flops import TransformerConfig, transformer_flops, transformer_work

__all__ = ["Cost", "HSTUFlops", "TransformerConfig", "transformer_flops", "transformer_work"]
