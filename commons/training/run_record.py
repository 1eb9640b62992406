"""Where the figures of a run go: a progress bar and lines of text, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class RunRecord:
    """Shows and writes figures on rank 0, and does nothing on the others.

    Args:
        folder: gets `train.jsonl`, which is appended to, and `tensorboard`.
        num_steps: steps of the run.
        first_step: steps that were done before this process; what TensorBoard has of later ones goes.
    """

    def __init__(self, folder: Path, num_steps: int, first_step: int) -> None:
        self._here = dist.get_rank() == 0
        if not self._here:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True)
        self._file = (folder / "train.jsonl").open("a")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here:
            self._bar.close()
            self._file.close()
            self._tensorboard.close()

    def advance(self) -> None:
        """Moves the bar on by a step."""
        if self._here:
            self._bar.update()

    def write(self, kind: str, step: int, figures: dict[str, Any], text: str = "") -> None:
        """Writes figures of a step, and shows `text`, if there is any.

        In TensorBoard a number is the scalar `kind/name`, and a list of numbers, one per rank, the scalars
        `kind/name/largest` and `kind/name/mean`; what else there is stands in the JSON lines alone.
        """
        if not self._here:
            return
        if text:
            tqdm.write(text)
        self._file.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if isinstance(value, list):
                self._scalar(f"{kind}/{name}/largest", max(value), step)
                self._scalar(f"{kind}/{name}/mean", sum(value) / len(value), step)
            elif isinstance(value, int | float):
                self._scalar(f"{kind}/{name}", value, step)

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._tensorboard.add_scalar(name, value, step)
