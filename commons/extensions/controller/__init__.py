"""Controller: splits a batch among workers, merges their results, and plans several steps together."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .split import SplitOrder as SplitOrder
    from .split import merge as merge
    from .split import split_balanced as split_balanced
    from .split import split_groups as split_groups
    from .window import balance_window as balance_window
    from .window import step_ratios as step_ratios

__getattr__, __all__ = imported_on_use(
    __name__,
    {
        "split": ["SplitOrder", "merge", "split_balanced", "split_groups"],
        "window": ["balance_window", "step_ratios"],
    },
)
