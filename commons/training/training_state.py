"""What has to be restored for a training to go on as if it had not stopped."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.optim.keyed import CombinedOptimizer

from commons.training.checkpoints import Checkpoints
from commons.training.progress import Progress
from commons.unbounded_ids import ShardedUnboundedEmbeddingCollection


@dataclass
class TrainingState:
    """A sharded model, its optimisers, how far training has come, and this rank's random state.

    Attributes:
        model: as `shard_model` returns it.
        optimizer: likewise; None to read the model alone, whatever it was trained by.
        progress: steps that were computed.
    """

    model: torch.nn.Module
    optimizer: CombinedOptimizer | None
    progress: Progress = field(default_factory=Progress)

    def to_save(self) -> dict[str, Any]:
        """What `Checkpoints.save` takes: views, not copies."""
        if torch.cuda.is_available():  # rows may be on their way into a cache of a table
            torch.cuda.synchronize()
        state = {
            "model": self.model.state_dict(),
            "progress": dataclasses.asdict(self.progress),
            _random_key(): _random_state(),
        }
        return state if self.optimizer is None else state | {"optimizer": self.optimizer.state_dict()}

    def restore(self, checkpoints: Checkpoints, checkpoint: Path) -> None:
        """Reads a checkpoint of any number of ranks. Collective.

        On as many ranks as wrote it training goes on exactly as it would have. On another number all ranks
        keep the random state that they were started with, and unbounded ids move to the ranks that own them.

        Raises:
            ValueError: the checkpoint is of another model or optimiser.
        """
        if self.optimizer is not None:
            # One that has not stepped has no state to be filled, and would be left without a word.
            self.optimizer.init_state()
            self.optimizer.zero_grad()
        state = self.to_save()
        if _random_key() not in {key.partition(".")[0] for key in checkpoints.keys(checkpoint)}:
            del state[_random_key()]
        checkpoints.load(checkpoint, state)
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for module in self.model.modules():
            if isinstance(module, ShardedUnboundedEmbeddingCollection):
                module.place_loaded_ids()
        self.progress = Progress(**state["progress"])
        if _random_key() in state:
            _set_random_state(state[_random_key()])


def _random_key() -> str:
    """Names the ranks too: with another number of them, no rank's random numbers are those of before."""
    return f"random_{dist.get_rank()}_of_{dist.get_world_size()}"


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
