"""Learned costs: what samples cost, and how fast ranks are, from measured steps."""

from .learned_costs import LearnedCosts

__all__ = ["LearnedCosts"]
