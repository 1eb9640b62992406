"""AUC of action predictions."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics.classification import BinaryAUROC

from commons.training.evaluation_metrics import EvaluationMetrics


class RankingMetrics(EvaluationMetrics):
    """Area under the ROC curve, exact, over all label tokens of all ranks.

    Of a classification head over ordered classes: whether the class is at least `positive_class`, scored by
    the summed probability of those classes. Of several tasks: each task's own, from its logit, and the mean.

    Args:
        num_tasks: binary tasks per label; 1 for classes.
        positive_class: the first class that counts as positive, for `num_tasks` = 1.
        device: of the outputs.
    """

    def __init__(self, num_tasks: int, positive_class: int, device: torch.device) -> None:
        self._num_tasks = num_tasks
        self._positive_class = positive_class
        self._aucs = [BinaryAUROC(validate_args=False).to(device) for _ in range(num_tasks)]

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
        """`{"AUC": …}`, with `AUC_task0` and so on where there are several tasks."""
        values = [float(auc.compute()) for auc in self._aucs]
        for auc in self._aucs:
            auc.reset()
        figures = {"AUC": sum(values) / len(values)}
        if self._num_tasks > 1:
            figures |= {f"AUC_task{task}": value for task, value in enumerate(values)}
        return figures
