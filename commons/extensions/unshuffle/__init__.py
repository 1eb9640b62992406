"""Unshuffle: results back to where their samples were loaded."""

from .unshuffle import Unshuffle

__all__ = ["Unshuffle"]
