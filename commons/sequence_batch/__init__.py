"""Batches of sequences, and tools that take any batch apart into rows and rebuild it."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .base_batch import BaseBatch as BaseBatch
    from .tree import move_to as move_to
    from .tree import register_batch_type as register_batch_type

__getattr__, __all__ = imported_on_use(
    __name__, {"base_batch": ["BaseBatch"], "tree": ["move_to", "register_batch_type"]}
)
