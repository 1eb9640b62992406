"""Names that `commons.training` does not export: the one place where tests know its files."""

from commons.training.balance_flags import make_extensions
from commons.training.checkpoints import CONTENTS_FILE, CheckpointFolder, Checkpoints
from commons.training.entry_point import _pipelines
from commons.training.hang_watch import HangWatch
from commons.training.host_copies import HostCopies
from commons.training.plain_reader import PlainReader
from commons.training.rank_process import rank_process
from commons.training.run_log import RunRecord, interval_figures, text_of
from commons.training.sharded_model import initialize_rows
from commons.training.step_vote import StepVote
from commons.training.synchronized_gc import SynchronizedGC
from commons.training.training_state import Progress, TrainingState
