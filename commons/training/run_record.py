"""Where the figures of a run go: a progress bar and lines of text, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

logger = logging.getLogger(__name__)


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
        self._lines, self._scalars = folder / "train.jsonl", folder / "tensorboard"
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True)
        self._file = self._lines.open("a")
        self._tensorboard = SummaryWriter(str(self._scalars), purge_step=first_step + 1)
        self._lost: set[Path] = set()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here:
            self._bar.close()
            self._unless_lost(self._lines, self._file.close)
            self._unless_lost(self._scalars, self._tensorboard.close)

    def advance(self) -> None:
        """Moves the bar on by a step."""
        if self._here:
            self._bar.update()

    def write(self, kind: str, step: int, figures: dict[str, Any], text: str = "") -> None:
        """Writes figures of a step, and shows `text`, if there is any.

        A number that is not finite is `null` in the JSON lines, where JSON has no other word for it, and is
        left out of TensorBoard.

        In TensorBoard a number is the scalar `kind/name`, and a list of numbers, one per rank, the scalars
        `kind/name/largest` and `kind/name/mean`; what else there is stands in the JSON lines alone.
        """
        if not self._here:
            return
        if text:
            tqdm.write(text)
        self._unless_lost(self._lines, lambda: self._write_line(kind, step, figures))
        self._unless_lost(self._scalars, lambda: self._write_scalars(kind, step, figures))

    def _unless_lost(self, path: Path, write: Callable[[], None]) -> None:
        """Writes, unless that has failed before: on a full disk figures are lost, and not the training."""
        if path in self._lost:
            return
        try:
            write()
        except OSError as error:
            self._lost.add(path)
            logger.warning(f"figures are not written to {path} any more: {error}")

    def _write_line(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        self._file.flush()

    def _write_scalars(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            scalars = {}
            if isinstance(value, list):
                scalars = {f"{name}/largest": max(value), f"{name}/mean": sum(value) / len(value)}
            elif isinstance(value, int | float):
                scalars = {name: value}
            for scalar, number in scalars.items():
                if math.isfinite(number):
                    self._tensorboard.add_scalar(f"{kind}/{scalar}", number, step)
