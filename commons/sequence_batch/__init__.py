"""Batches of sequences, and tools that take any batch apart into rows and rebuild it."""

from .base_batch import BaseBatch
from .tree import move_to, register_batch_type

__all__ = ["BaseBatch", "move_to", "register_batch_type"]
