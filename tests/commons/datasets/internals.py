"""Names that `commons.datasets` does not export: the one place where tests know its files."""

from commons.datasets.hstu_batch import HSTUSample, collate_hstu_batch
from commons.datasets.prepared_files import replaced_files
from commons.datasets.retrieval_source import NEGATIVES
