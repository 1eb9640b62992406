"""Padded models: places samples so that every rank pads little, and all pay the same."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .padded import Padded as Padded

__getattr__, __all__ = imported_on_use(__name__, {"padded": ["Padded"]})
