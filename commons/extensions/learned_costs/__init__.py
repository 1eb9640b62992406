"""Learned costs: sample costs and rank speeds, learned from measured steps."""

from .learned_costs import LearnedCosts

__all__ = ["LearnedCosts"]
