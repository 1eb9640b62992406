"""Sample groups: brings samples that belong together to one rank, if possible."""

from typing import TYPE_CHECKING

from ...lazy_names import imported_on_use

if TYPE_CHECKING:
    from .groups import rebalance_groups as rebalance_groups
    from .sample_groups import SampleGroups as SampleGroups

__getattr__, __all__ = imported_on_use(
    __name__, {"groups": ["rebalance_groups"], "sample_groups": ["SampleGroups"]}
)
