"""Names that `hstu.training` does not export: the one place where tests know its files."""

from hstu.training.model_args import NetworkArgs, RetrievalArgs
