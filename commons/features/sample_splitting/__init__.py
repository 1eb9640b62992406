"""Sample splitting: long samples in pieces on several ranks."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .key_fetch import PlacedPieces
    from .split_samples import SplitSamples

__all__ = ["PlacedPieces", "SplitSamples"]

__getattr__ = imported_on_use(__name__, {"key_fetch": ["PlacedPieces"], "split_samples": ["SplitSamples"]})
