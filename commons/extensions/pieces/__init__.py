"""Pieces: computes long samples in pieces on several ranks."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .key_fetch import PlacedPieces as PlacedPieces
    from .pieces import Pieces as Pieces

__getattr__, __all__ = imported_on_use(__name__, {"key_fetch": ["PlacedPieces"], "pieces": ["Pieces"]})
