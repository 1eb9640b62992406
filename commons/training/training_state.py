"""The state of a training: how far it has come, the batches that are left, and what a checkpoint holds."""

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
# Settings that a resumed training may change. It goes on with the new value, and says so.
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
_MOST_PARAMETERS = 3  # named in an error
# Parts of a checkpoint. Each rank has its own of the last three.
_LEARNED, _OWN, _TIMES, _RANDOM = "learned", "learned_here", "learned_times", "random"


@dataclass(frozen=True)
class Progress:
    """Steps and epochs that a training has done, independent of the number of ranks.

    Attributes:
        step: computed steps.
        epoch: epoch of the next step.
        sample: computed samples of that epoch, over all ranks.
        owes_evaluation: whether the last step's evaluation was left out, because the run was to stop.
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0
    owes_evaluation: bool = False

    def after_step(self, dataset: SequenceDataset) -> Progress:
        """Returns the progress after one more step over `dataset`."""
        return Progress(self.step + 1, self.epoch, self.sample + dataset.samples_per_step).within(dataset)

    def within(self, dataset: SequenceDataset) -> Progress:
        """Returns this progress, or that of the next epoch if `dataset`, which may have shrunk, has ended."""
        ended = self.sample >= dataset.num_samples
        return dataclasses.replace(self, epoch=self.epoch + 1, sample=0) if ended else self

    def steps_left(self, dataset: SequenceDataset) -> int:
        """Returns the steps left of the first epoch."""
        if self.epoch:
            return 0
        return -(-(dataset.num_samples - self.sample) // dataset.samples_per_step)


def training_batches(task: TrainingTask, device: torch.device, progress: Progress) -> Iterator[BaseBatch]:
    """Yields the training batches after `progress`, one epoch after the other, without end."""
    epoch, sample = progress.epoch, progress.sample
    while task.train_dataset.loads_here:
        task.train_dataset.set_epoch(epoch, sample)
        yield from host_batches(task, task.train_dataset, device)
        epoch, sample = epoch + 1, 0


def host_batches(task: TrainingTask, dataset: SequenceDataset, device: torch.device) -> Iterator[BaseBatch]:
    """Yields the checked batches of a dataset of the task, in pinned memory if `device` is a GPU."""
    for batch in dataset:
        task.check_batch(batch)
        yield batch.pin_memory() if device.type == "cuda" else batch


@dataclass
class TrainingState:
    """State from which a resumed training goes on as if it had never stopped.

    Attributes:
        model, optimizer: results of `shard_model`. Without the optimizer, only the model is read.
        settings: settings that a resumed training shares with the one that saved it; see `changes`.
        progress: steps and epochs that training has done.
        learning: costs and speeds that were learned, as restored.
    """

    model: torch.nn.Module
    optimizer: CombinedOptimizer | None
    settings: dict[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    learning: dict[str, bytes] = field(default_factory=dict)
    _learned: Any = None

    def follow(self, learned: Any) -> None:
        """Gives a new pipeline's `LearnedCosts` what was restored, and saves their state from now on; None if
        it learns no costs."""
        if learned is None:
            self.learning = {}
        else:
            learned.load_state(self.learning)
        self._learned = learned

    def to_save(self) -> dict[str, Any]:
        """Returns the state for `Checkpoints.save`: views, not copies."""
        if torch.cuda.is_available():  # rows may be on their way into a table's cache
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
                state[_of_rank(_OWN)] = learning["learned"]  # that of this rank's set
        return state if self.optimizer is None else state | {"optimizer": self.optimizer.state_dict()}

    def settings_to_save(self) -> dict[str, Any]:
        """Returns the settings for `Checkpoints.save`, with dtype and shape of each parameter and buffer."""
        with (
            warnings.catch_warnings()
        ):  # torch deprecates ShardedTensor, in which TorchRec returns its tables
            warnings.simplefilter("ignore", FutureWarning)
            parameters = {
                _PARAMETERS + name: f"{str(value.dtype).removeprefix('torch.')} {list(value.size())}"
                for name, value in self.model.state_dict().items()
                if hasattr(value, "dtype")
            }
        return json.loads(json.dumps(self.settings | parameters, default=str))

    def restore(self, checkpoints: Checkpoints, checkpoint: Path) -> list[str]:
        """Reads a checkpoint written by any number of ranks. Collective.

        On the same number of ranks, training goes on exactly as it would have. On another number, each rank
        keeps its initial random state, and unbounded ids move to the ranks that own them. The optimizer keeps
        its own learning rate.

        Returns:
            One line for each setting that differs from the checkpoint's, and may.

        Raises:
            ValueError: the checkpoint is of another training.
        """
        changed = changes(checkpoint, checkpoints.settings(checkpoint), self.settings_to_save())
        if self.optimizer is not None:
            # Without a step an optimizer has no state, and loading would silently skip it.
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
    # The number of ranks, too: on another number, no rank continues a random stream.
    return f"{name}_{dist.get_rank()}_of_{dist.get_world_size()}"


def _random_state() -> dict[str, torch.Tensor]:
    on_device = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def settings_of(*configurables: Any) -> dict[str, Any]:
    """Returns all fields of gin configurables, by the names that gin files have for them."""
    return {
        f"{type(args).__name__}.{field.name}": getattr(args, field.name)
        for args in configurables
        for field in dataclasses.fields(args)
    }


def changes(checkpoint: Path, saved: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Returns one line for each setting that has changed since, and may.

    Settings that only one of them has are not compared; parameters must be the same.

    Raises:
        ValueError: another setting differs, or a parameter; names each, with both values.
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
