"""A batch that one process holds: its division among workers, and what they return."""

from .split import SplitOrder, merge, split_balanced, split_groups

__all__ = ["SplitOrder", "merge", "split_balanced", "split_groups"]
