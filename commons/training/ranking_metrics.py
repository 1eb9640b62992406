"""AUC of action predictions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities.data import dim_zero_cat

from commons.training.evaluation_metrics import EvaluationMetrics
from commons.training.rank_zero_log import warn_once


class RankingMetrics(EvaluationMetrics):
    """Area under the ROC curve, exact, over all label tokens of all ranks.

    Of a classification head over ordered classes: whether the class is at least `positive_class`, scored by
    the summed probability of those classes. Of several tasks: each task's own, from its logit, and the mean.
    A task whose labels were all positive or all negative has no such area: its AUC is NaN, the mean leaves it
    out, and one warning names it.

    Args:
        num_tasks: binary tasks per label; 1 for classes.
        positive_class: the first class that counts as positive, for `num_tasks` = 1.
        device: of the outputs.
    """

    def __init__(self, num_tasks: int, positive_class: int, device: torch.device) -> None:
        self._num_tasks = num_tasks
        self._positive_class = positive_class
        self._aucs = [_TaskAUC(validate_args=False).to(device) for _ in range(num_tasks)]

    def update(self, output: Any) -> None:
        """Takes logits `[tokens, width]` and integer labels `[tokens]` of a ranking output."""
        logits, labels = output.logits, output.labels
        if logits.shape[1] > self._num_tasks:  # classes, not one output per task
            scores = logits.softmax(-1)[:, self._positive_class :].sum(-1)
            self._aucs[0].update(scores, (labels >= self._positive_class).long())
            return
        for task, auc in enumerate(self._aucs):
            auc.update(logits[:, task].sigmoid(), (labels >> task) & 1)

    def compute(self) -> dict[str, float]:
        """`{"AUC": …}`, with `AUC_task0` and so on where there are several tasks; NaN where there is none."""
        values = [float(auc.compute()) for auc in self._aucs]
        for auc in self._aucs:
            auc.reset()
        known = [value for value in values if not math.isnan(value)]
        if len(known) < len(values):
            self._warn_of_one_class([task for task, value in enumerate(values) if math.isnan(value)])
        figures = {"AUC": sum(known) / len(known) if known else math.nan}
        if self._num_tasks > 1:
            figures |= {f"AUC_task{task}": value for task, value in enumerate(values)}
        return figures

    def _warn_of_one_class(self, tasks: list[int]) -> None:
        of_tasks = f" of task {', '.join(map(str, tasks))}" if self._num_tasks > 1 else ""
        warn_once(
            [
                f"all labels{of_tasks} in an evaluation are of one class, which has no AUC: shown as nan "
                "and left out of the mean. More samples may have both (TrainerArgs.max_eval_iters)"
            ]
        )


class _TaskAUC(BinaryAUROC):
    """The area under one task's curve; NaN, which BinaryAUROC has 0 for, if one class is all there was."""

    def compute(self) -> torch.Tensor:
        """A scalar over the labels of all ranks. Collective: torchmetrics gathers them before."""
        labels = dim_zero_cat(self.target)
        if labels.numel() == 0 or labels.min() == labels.max():
            return torch.tensor(math.nan)
        return super().compute()
