"""Verification: ranks compare plans and samples, for debugging and tests."""

from .verification import Verification

__all__ = ["Verification"]
