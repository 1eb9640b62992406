"""Batches of sequences, and row selection on their jagged fields."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .base_batch import BaseBatch
    from .containers import moved_to, register_batch_type

__all__ = ["BaseBatch", "moved_to", "register_batch_type"]

__getattr__ = imported_on_use(
    __name__, {"base_batch": ["BaseBatch"], "containers": ["moved_to", "register_batch_type"]}
)
