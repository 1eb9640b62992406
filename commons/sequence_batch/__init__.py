"""Batches of sequences, and tools that take any batch apart into rows and rebuild it."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .base_batch import BaseBatch as BaseBatch
    from .container_types import register_batch_type as register_batch_type
    from .tree import move_to as move_to

__getattr__, __all__ = imported_on_use(
    __name__,
    {
        "base_batch": ["BaseBatch"],
        "container_types": ["register_batch_type"],
        "tree": ["move_to"],
    },
)
