"""Pieces: long samples in pieces on several ranks."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .key_fetch import PlacedPieces
    from .pieces import Pieces

__all__ = ["Pieces", "PlacedPieces"]

__getattr__ = imported_on_use(__name__, {"key_fetch": ["PlacedPieces"], "pieces": ["Pieces"]})
