"""Faults to be put in."""
from typing import Any
MUTANTS: dict[str, Any] = {}
