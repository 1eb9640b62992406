"""The state of a training: its progress, its remaining batches, and the contents of its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.optim.keyed import CombinedOptimizer

from ..datasets import SequenceDataset
from ..sequence_batch import BaseBatch
from ..unbounded_ids import ShardedUnboundedEmbeddingCollection
from .checkpoints import Checkpoints
from .training_task import TrainingTask

SAMPLES = "samples of an epoch"
# Settings that a resumed training may change. It continues with the new value, and logs the change.
_MAY_CHANGE = {
    SAMPLES,
    "NetworkArgs.dtype_str",
    "NetworkArgs.embedding_backend",
    "NetworkArgs.hidden_dropout",
    "NetworkArgs.kernel_backend",
    "NetworkArgs.recompute_input_layernorm",
    "NetworkArgs.recompute_input_silu",
    "OptimizerArgs.adam_beta1",
    "OptimizerArgs.adam_beta2",
    "OptimizerArgs.adam_eps",
    "OptimizerArgs.learning_rate",
    "OptimizerArgs.weight_decay",
    "RankingArgs.eval_metrics",
    "RetrievalArgs.eval_metrics",
    "RetrievalArgs.num_negatives",
    "RetrievalArgs.temperature",
}
_PARAMETERS = "parameter "
_MOST_PARAMETERS = 3  # named in one error
# Keys of a checkpoint. Each rank has its own entry for the last three.
_LEARNED, _OWN, _TIMES, _RANDOM = "learned", "learned_here", "learned_times", "random"


@dataclass(frozen=True)
class Progress:
    """Completed steps and epochs of a training, independent of the number of ranks.

    Attributes:
        step: number of completed steps.
        epoch: epoch of the next step, from 0.
        sample: number of samples of that epoch already trained on, over all ranks.
        owes_evaluation: whether the evaluation after the last step was skipped because the run stopped.
        best: largest value of `TrainerArgs.best_metric` so far, or None.
        evaluations_since_best: number of evaluations since then.
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0
    owes_evaluation: bool = False
    best: float | None = None
    evaluations_since_best: int = 0

    def after_step(self, dataset: SequenceDataset) -> Progress:
        """Returns the progress after one more step over `dataset`."""
        sample = self.sample + dataset.samples_per_step
        after = dataclasses.replace(self, step=self.step + 1, sample=sample, owes_evaluation=False)
        return after.within(dataset)

    def after_evaluation(self, value: float) -> Progress:
        """Returns the progress after an evaluation with this value of `TrainerArgs.best_metric`."""
        if self.best is None or value > self.best:
            return dataclasses.replace(self, best=value, evaluations_since_best=0)
        return dataclasses.replace(self, evaluations_since_best=self.evaluations_since_best + 1)

    def within(self, dataset: SequenceDataset) -> Progress:
        """Returns this progress, or the next epoch's start if this one is over: `dataset` may have shrunk."""
        ended = self.sample >= dataset.num_samples
        return dataclasses.replace(self, epoch=self.epoch + 1, sample=0) if ended else self

    def steps_left(self, dataset: SequenceDataset) -> int:
        """Returns the number of steps left in the first epoch, which is 0 in later epochs."""
        if self.epoch:
            return 0
        return -(-(dataset.num_samples - self.sample) // dataset.samples_per_step)


def training_batches(task: TrainingTask, device: torch.device, progress: Progress) -> Iterator[BaseBatch]:
    """Yields the training batches after `progress`, epoch after epoch, without end if this rank loads."""
    epoch, sample = progress.epoch, progress.sample
    while task.train_dataset.loads_here:
        task.train_dataset.set_epoch(epoch, sample)
        yield from host_batches(task, task.train_dataset, device)
        epoch, sample = epoch + 1, 0


def host_batches(task: TrainingTask, dataset: SequenceDataset, device: torch.device) -> Iterator[BaseBatch]:
    """Checks and yields the batches of a dataset, in pinned memory if `device` is a GPU."""
    for batch in dataset:
        task.check_batch(batch)
        yield batch.pin_memory() if device.type == "cuda" else batch


@dataclass
class TrainingState:
    """State from which a resumed training continues as if it had never stopped.

    Attributes:
        model, optimizer: results of `shard_model`. An optimizer of None omits its state.
        settings: settings of this training, which `changes` compares with a checkpoint's.
        progress: completed steps and epochs.
        learning: restored state of learned costs and speeds.
    """

    model: torch.nn.Module
    optimizer: CombinedOptimizer | None
    settings: dict[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    learning: dict[str, bytes] = field(default_factory=dict)
    _learned: Any = None

    def follow(self, learned: Any) -> None:
        """Restores the `LearnedCosts` of a new pipeline, and saves its state from now on.

        None means that the pipeline learns no costs. The restored state is then dropped.
        """
        if learned is None:
            self.learning = {}
        else:
            learned.load_state(self.learning)
        self._learned = learned

    def to_save(self) -> dict[str, Any]:
        """Returns the state for `Checkpoints.save`. Its tensors are views, not copies."""
        if torch.cuda.is_available():  # prefetched rows may be in flight to a table's cache
            torch.cuda.synchronize()
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "progress": dataclasses.asdict(self.progress),
            _of_rank(_RANDOM): _random_state(),
        }
        learning = self.learning if self._learned is None else self._learned.state()
        if learning:
            state[_LEARNED], state[_of_rank(_TIMES)] = learning["learned"], learning["times"]
            if self._learned is not None and self._learned.num_ranks < dist.get_world_size():
                state[_of_rank(_OWN)] = learning["learned"]  # as learned by this rank's group
        return state if self.optimizer is None else state | {"optimizer": self.optimizer.state_dict()}

    def settings_to_save(self) -> dict[str, Any]:
        """Returns the settings for `Checkpoints.save`, with dtype and shape of each parameter and buffer."""
        with warnings.catch_warnings():  # TorchRec returns tables as ShardedTensors, which torch deprecates
            warnings.simplefilter("ignore", FutureWarning)
            parameters = {
                _PARAMETERS + name: f"{str(value.dtype).removeprefix('torch.')} {list(value.size())}"
                for name, value in self.model.state_dict().items()
                if hasattr(value, "dtype")
            }
        return json.loads(json.dumps(self.settings | parameters, default=str))

    def restore(self, checkpoints: Checkpoints, checkpoint: Path) -> list[str]:
        """Restores a checkpoint written by any number of ranks. Collective.

        On the same number of ranks, training continues exactly as if it had not stopped. On another number,
        each rank keeps its initial random state, and unbounded ids move to the ranks that own them. The
        learning rate is the optimizer's own, not the checkpoint's.

        Returns:
            One line for each setting that differs from the checkpoint's and may differ.

        Raises:
            ValueError: the checkpoint belongs to another training.
        """
        changed = changes(checkpoint, checkpoints.settings(checkpoint), self.settings_to_save())
        if self.optimizer is not None:
            # An optimizer has no state before its first step, and loading would silently skip it.
            self.optimizer.init_state()
            self.optimizer.zero_grad()
        state = self.to_save()
        keys = checkpoints.keys(checkpoint)
        saved = {key.partition(".")[0] for key in keys}
        random, own, times = (_of_rank(name) for name in (_RANDOM, _OWN, _TIMES))
        if random not in saved:
            del state[random]
        state |= {key: b"" for key in (_LEARNED, own, times) if key in saved}
        state["progress"] = {name: of for name, of in state["progress"].items() if f"progress.{name}" in keys}
        checkpoints.load(checkpoint, state)
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for module in self.model.modules():
            if isinstance(module, ShardedUnboundedEmbeddingCollection):
                module.place_loaded_ids()
        self.progress = Progress(**state["progress"])
        parts = {"learned": own if own in state else _LEARNED, "times": times}
        self.learning = {name: state[part] for name, part in parts.items() if part in state}
        if random in state:
            _set_random_state(state[random])
        return changed


def _of_rank(name: str) -> str:
    # Includes the number of ranks, because random streams continue only on the same number of ranks.
    return f"{name}_{dist.get_rank()}_of_{dist.get_world_size()}"


def _random_state() -> dict[str, torch.Tensor]:
    on_device = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def settings_of(*configurables: Any) -> dict[str, Any]:
    """Returns all fields of gin configurables by name, such as "OptimizerArgs.learning_rate"."""
    return {
        f"{type(args).__name__}.{field.name}": getattr(args, field.name)
        for args in configurables
        for field in dataclasses.fields(args)
    }


def changes(checkpoint: Path, saved: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Returns one line for each setting that has changed since the checkpoint and may change.

    Compares only settings that are in both `saved` and `asked`. Parameters must match exactly.

    Raises:
        ValueError: any other setting or a parameter differs. The message names it, with both values.
    """
    absent = "absent"
    lines = {
        name: f"{name} = {asked.get(name, absent)!r}, the checkpoint has {saved.get(name, absent)!r}"
        for name in asked | saved
        if saved.get(name, absent) != asked.get(name, absent)
        and (name.startswith(_PARAMETERS) or name in asked.keys() & saved.keys())
    }
    wrong = [
        line for name, line in lines.items() if name not in _MAY_CHANGE and not name.startswith(_PARAMETERS)
    ]
    parameters = [line for name, line in lines.items() if name.startswith(_PARAMETERS)]
    if len(parameters) > _MOST_PARAMETERS:
        parameters[_MOST_PARAMETERS:] = [f"and {len(parameters) - _MOST_PARAMETERS} more parameters"]
    if wrong or parameters:
        raise ValueError(
            f"{checkpoint} is of another training: {'; '.join(wrong + parameters)}. Resume with the "
            "checkpoint's settings, or choose another folder of checkpoints"
        )
    return list(lines.values())
