"""Names that `hstu` does not export: the one place where tests know its files."""

from hstu.batch_shuffler import HSTUBatchShuffler
from hstu.training.model_args import NetworkArgs, RetrievalArgs
