"""Micro-batches under a cap of tokens, and the forward that runs them."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .micro_batch_forward import run_micro_batches
    from .micro_batches import MicroBatches

__all__ = ["MicroBatches", "run_micro_batches"]

__getattr__ = imported_on_use(
    __name__, {"micro_batch_forward": ["run_micro_batches"], "micro_batches": ["MicroBatches"]}
)
