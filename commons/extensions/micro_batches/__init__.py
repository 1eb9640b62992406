"""Micro-batches under a token cap: divides the samples of ranks, and runs the micro-batches."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .micro_batch_forward import run_micro_batches as run_micro_batches
    from .micro_batches import MicroBatches as MicroBatches
    from .packing import pack_micro_batches as pack_micro_batches

__getattr__, __all__ = imported_on_use(
    __name__,
    {
        "micro_batch_forward": ["run_micro_batches"],
        "micro_batches": ["MicroBatches"],
        "packing": ["pack_micro_batches"],
    },
)
