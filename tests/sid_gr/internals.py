"""Names that `sid_gr` does not export: the one place where tests know its files."""

from sid_gr.batch_shuffler import SIDGRBatchShuffler
from sid_gr.models import sid_gr as model_file
from sid_gr.modules import attention
from sid_gr.training.model_args import NetworkArgs
from sid_gr.training.sid_gr_task import transformer_config
