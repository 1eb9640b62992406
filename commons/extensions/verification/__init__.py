"""Verification: compares plans and samples across ranks, for debugging and tests."""

from .verification import Verification

__all__ = ["Verification"]
