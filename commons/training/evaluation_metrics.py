"""What an evaluation measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class EvaluationMetrics(ABC):
    """Figures of merit over an evaluation set that is spread over the ranks."""

    def bind(self, model: torch.nn.Module) -> None:  # noqa: B027  most metrics need no model
        """Takes the sharded model, once, before any evaluation; for figures that need its tables."""

    @abstractmethod
    def update(self, output: Any) -> None:
        """Takes the model's output of one batch."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The figures over all ranks, and a fresh start. Collective over all ranks."""
