"""Loss of predicted actions."""

from __future__ import annotations

import torch
from torch.nn import functional


class ActionLoss:
    """The summed loss of a head with `width` outputs, for `num_tasks` tasks.

    With `width == num_tasks`, the loss is binary cross-entropy: each output is a task, and bit t of the
    action labels task t. With one task and a wider head, the loss is cross-entropy: the outputs are classes,
    and the action is the label.

    Raises:
        ValueError: `num_tasks` is not positive, or it is above 1 and `width` differs from it.
    """

    def __init__(self, num_tasks: int, width: int) -> None:
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; expected at least 1")
        if num_tasks > 1 and width != num_tasks:
            raise ValueError(
                f"prediction_head_arch ends in width {width}; with num_tasks = {num_tasks} it must end in "
                f"{num_tasks}, one output per task"
            )
        self.num_tasks = num_tasks
        self.is_binary = width == num_tasks
        self.num_actions = 2**num_tasks if self.is_binary else width

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the summed loss of the label tokens, a float32 scalar; tasks are averaged per token.

        Args:
            logits: `[num_label_tokens, width]`, of any floating-point type.
            labels: `[num_label_tokens]` integers.

        Raises:
            ValueError: a label is outside the head's classes. Checked on CPU only, because the check would
                synchronize host and device on CUDA.
        """
        if labels.device.type == "cpu":
            self._check(labels)
        if not self.is_binary:
            return functional.cross_entropy(logits.float(), labels.long(), reduction="sum")
        bits = labels.unsqueeze(1) >> torch.arange(self.num_tasks, device=labels.device) & 1
        total = functional.binary_cross_entropy_with_logits(logits.float(), bits.float(), reduction="sum")
        return total / self.num_tasks

    def _check(self, labels: torch.Tensor) -> None:
        outside = labels[(labels < 0) | (labels >= self.num_actions)]
        if outside.numel():
            meaning = f"{self.num_tasks} bits" if self.is_binary else f"{self.num_actions} classes"
            raise ValueError(
                f"label {int(outside[0])} is outside the head's {meaning}; "
                f"expected 0 to {self.num_actions - 1}"
            )
