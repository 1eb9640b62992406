"""Plans, and the exchange of samples between ranks."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .balance_report import BalanceReport as BalanceReport
    from .batch_shuffler import BatchShuffler as BatchShuffler
    from .batch_shuffler_factory import BatchShufflerFactory as BatchShufflerFactory
    from .batch_shuffler_factory import IdentityShuffler as IdentityShuffler
    from .batch_shuffler_factory import register_batch_shuffler as register_batch_shuffler
    from .extension import Extension as Extension
    from .shuffle_plan import ShufflePlan as ShufflePlan
    from .shuffler_settings import PARTITIONERS as PARTITIONERS
    from .shuffler_settings import ShufflerSettings as ShufflerSettings

__getattr__, __all__ = imported_on_use(
    __name__,
    {
        "balance_report": ["BalanceReport"],
        "batch_shuffler": ["BatchShuffler"],
        "batch_shuffler_factory": ["BatchShufflerFactory", "IdentityShuffler", "register_batch_shuffler"],
        "extension": ["Extension"],
        "shuffle_plan": ["ShufflePlan"],
        "shuffler_settings": ["PARTITIONERS", "ShufflerSettings"],
    },
)
