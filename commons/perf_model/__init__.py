"""Cost models of samples: FLOPs, or times fitted to measured steps."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .cost import Cost as Cost
    from .hstu_flops import HSTUFlops as HSTUFlops
    from .transformer_layers import TransformerConfig as TransformerConfig
    from .transformer_layers import transformer_flops as transformer_flops
    from .transformer_layers import transformer_work as transformer_work

__getattr__, __all__ = imported_on_use(
    __name__,
    {
        "cost": ["Cost"],
        "hstu_flops": ["HSTUFlops"],
        "transformer_layers": ["TransformerConfig", "transformer_flops", "transformer_work"],
    },
)
