"""Plans, and the exchange of samples between ranks."""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use

if TYPE_CHECKING:
    from .extension import Extension as Extension
    from .plan import ShufflePlan as ShufflePlan
    from .report import BalanceReport as BalanceReport
    from .settings import PARTITIONERS as PARTITIONERS
    from .settings import ShufflerSettings as ShufflerSettings
    from .shuffler import BatchShuffler as BatchShuffler
    from .shuffler import BatchShufflerFactory as BatchShufflerFactory
    from .shuffler import IdentityShuffler as IdentityShuffler
    from .shuffler import register_batch_shuffler as register_batch_shuffler

__getattr__, __all__ = imported_on_use(
    __name__,
    {
        "report": ["BalanceReport"],
        "shuffler": ["BatchShuffler", "BatchShufflerFactory", "IdentityShuffler", "register_batch_shuffler"],
        "extension": ["Extension"],
        "plan": ["ShufflePlan"],
        "settings": ["PARTITIONERS", "ShufflerSettings"],
    },
)
