"""Batches of sequences, and row selection on their jagged fields."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .base_batch import BaseBatch
    from .container_types import register_batch_type
    from .tree import move_to

__all__ = ["BaseBatch", "move_to", "register_batch_type"]

__getattr__ = imported_on_use(
    __name__,
    {
        "base_batch": ["BaseBatch"],
        "container_types": ["register_batch_type"],
        "tree": ["move_to"],
    },
)
