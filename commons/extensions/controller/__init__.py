"""Controller: splits a batch among workers, merges their results, and plans several steps together."""

from .split import merge, split_balanced, split_groups
from .window import balance_window, step_ratios

__all__ = ["balance_window", "merge", "split_balanced", "split_groups", "step_ratios"]
