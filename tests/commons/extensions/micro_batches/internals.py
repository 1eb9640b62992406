"""Names that `commons.extensions.micro_batches` does not export: the one place where tests know its files."""

from commons.extensions.micro_batches.divided_batch import rows_of_micro_batches
from commons.extensions.micro_batches.division import micro_batch_imbalance, number_micro_batches
from commons.extensions.micro_batches.looked_up import LookedUp
from commons.extensions.micro_batches.packing import check_samples
