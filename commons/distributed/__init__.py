"""Plans, and the exchange of samples between ranks."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .balance_report import BalanceReport
    from .batch_shuffler import BatchShuffler
    from .batch_shuffler_factory import BatchShufflerFactory, IdentityShuffler, register_batch_shuffler
    from .extension import Extension
    from .failures import show_first_cause_only
    from .shuffle_plan import ShufflePlan
    from .shuffler_settings import PARTITIONERS, ShufflerSettings

__all__ = [
    "PARTITIONERS",
    "BalanceReport",
    "BatchShuffler",
    "BatchShufflerFactory",
    "Extension",
    "IdentityShuffler",
    "ShufflePlan",
    "ShufflerSettings",
    "register_batch_shuffler",
    "show_first_cause_only",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "balance_report": ["BalanceReport"],
        "batch_shuffler": ["BatchShuffler"],
        "batch_shuffler_factory": ["BatchShufflerFactory", "IdentityShuffler", "register_batch_shuffler"],
        "extension": ["Extension"],
        "failures": ["show_first_cause_only"],
        "shuffle_plan": ["ShufflePlan"],
        "shuffler_settings": ["PARTITIONERS", "ShufflerSettings"],
    },
)
