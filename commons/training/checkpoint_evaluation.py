"""The evaluation of a checkpoint, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from commons.training.evaluator import Evaluator, evaluation_text
from commons.training.hang_watch import HangWatch
from commons.training.rank_zero_log import warn_once
from commons.training.recovery import Recovery
from commons.training.run_record import RunRecord
from commons.training.sharded_model import shard_model
from commons.training.shared_collection import SharedCollection
from commons.training.step_vote import StepVote
from commons.training.training_args import OptimizerArgs, TrainerArgs
from commons.training.training_state import TrainingState
from commons.training.training_task import TrainingTask


def evaluate_checkpoint(task: TrainingTask, args: TrainerArgs, device: torch.device) -> dict[str, float]:
    """Evaluates the newest whole checkpoint of `ckpt_load_dir`. Collective over all ranks.

    The optimizer that trained it need not be known.

    Returns:
        The metrics, which are recorded as an evaluation of the checkpoint's step.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is of another model; or the training or the evaluation set is empty.
    """
    warn_once(args.settings_without_effect())
    task.check_datasets()
    cached = task.pipeline_name(args, device) == "prefetch"
    # Tables cannot be sharded without an optimizer; this one keeps no state.
    model, optimizer = shard_model(task.model, OptimizerArgs("sgd", 0.0), device, cached=cached)
    task.metrics.bind(model)
    state = TrainingState(model, optimizer=None)
    recovery = Recovery(replace(args, ckpt_save_interval=-1), state, StepVote(device), num_steps=0)
    recovery.resume()
    if dist.get_rank() == 0:
        tqdm.write(f"no training: {recovery.restored} is evaluated")
    collection, step = SharedCollection(args.gc_interval), state.progress.step
    with (
        HangWatch(args.log_dir, args.hang_timeout_s) as watch,
        RunRecord(Path(args.log_dir), step, step) as record,
        collection,
    ):
        figures = Evaluator(task, args, model, optimizer, device, watch, collection).evaluate()
        record.write("eval", step, figures, evaluation_text(step, figures))
    return figures
