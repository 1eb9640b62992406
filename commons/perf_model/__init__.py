"""Cost models of samples: FLOPs, and times fitted to measured steps."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .cost import Cost
    from .hstu_flops import HSTUFlops
    from .transformer_layers import TransformerConfig, transformer_flops, transformer_work

__all__ = ["Cost", "HSTUFlops", "TransformerConfig", "transformer_flops", "transformer_work"]

__getattr__ = imported_on_use(
    __name__,
    {
        "cost": ["Cost"],
        "hstu_flops": ["HSTUFlops"],
        "transformer_layers": ["TransformerConfig", "transformer_flops", "transformer_work"],
    },
)
