"""Plans, and the exchange of samples between ranks."""

from commons.distributed.balance_report import BalanceReport
from commons.distributed.batch_shuffler import BatchShuffler, IdentityShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory, register_batch_shuffler
from commons.distributed.controller_split import SplitOrder, merge, split_balanced
from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import PARTITIONERS, ShufflerSettings

__all__ = [
    "PARTITIONERS",
    "BalanceReport",
    "BatchShuffler",
    "BatchShufflerFactory",
    "IdentityShuffler",
    "ShufflePlan",
    "ShufflerSettings",
    "SplitOrder",
    "merge",
    "register_batch_shuffler",
    "split_balanced",
]
