"""Unshuffle: returns results to the ranks that loaded their samples."""

from .unshuffle import Unshuffle

__all__ = ["Unshuffle"]
