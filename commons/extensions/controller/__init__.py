"""Controller: splits a batch that one process holds among workers, and merges their results."""

from .split import SplitOrder, merge, split_balanced, split_groups

__all__ = ["SplitOrder", "merge", "split_balanced", "split_groups"]
