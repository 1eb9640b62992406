"""Batches of sequences, and row selection on their jagged fields."""

from commons.sequence_batch.base_batch import BaseBatch
from commons.sequence_batch.containers import moved_to, register_batch_type

__all__ = ["BaseBatch", "moved_to", "register_batch_type"]
