"""Evaluation metrics over all ranks: AUC of a ranking model; HitRate, Recall, and NDCG of retrieval."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities.data import dim_zero_cat

from ..argument_checks import require
from .run_log import warn_once

# Each sample has one right item, so recall, the share of right items found, equals the hit rate.
_KINDS = ("hr", "hitrate", "recall", "ndcg")
_NAME = re.compile(rf"({'|'.join(_KINDS)})@([1-9][0-9]*)", re.IGNORECASE)


class EvaluationMetrics(ABC):
    """Metrics over an evaluation set that is spread over the ranks."""

    def bind(self, model: torch.nn.Module) -> None:  # noqa: B027  most metrics need no model
        """Takes the sharded model once, before any evaluation, for metrics that read its tables."""

    @abstractmethod
    def update(self, output: Any) -> None:
        """Adds the model's output for one batch."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Returns the metrics over all ranks, and resets them. Collective over all ranks."""


class RankingMetrics(EvaluationMetrics):
    """Exact area under the ROC curve over all label tokens of all ranks.

    With ordered classes, a label is positive if its class is at least `positive_class`, and its score is the
    log-odds of those classes. With several tasks, each task has an AUC from its own logit, and "AUC" is their
    mean. If all labels of a task are of one class, its AUC is NaN, the mean omits it, and a warning says so.

    Args:
        num_tasks: number of binary tasks per label, or 1 if labels are classes.
        positive_class: first class that counts as positive, if labels are classes.
        device: device of the outputs.
    """

    def __init__(self, num_tasks: int, positive_class: int, device: torch.device) -> None:
        self._num_tasks = num_tasks
        self._positive_class = positive_class
        self._aucs = [_TaskAUC(validate_args=False).to(device) for _ in range(num_tasks)]

    def update(self, output: Any) -> None:
        """Adds the logits `[tokens, width]` and integer labels `[tokens]` of a ranking output."""
        logits, labels = output.logits, output.labels
        if logits.shape[1] > self._num_tasks:  # classes, not one output per task
            others, positive = logits.float().tensor_split([self._positive_class], 1)
            scores = positive.logsumexp(-1) - others.logsumexp(-1)  # probabilities near 1 would tie
            self._aucs[0].update(scores, labels >= self._positive_class)
            return
        for task, auc in enumerate(self._aucs):
            auc.update(logits[:, task], (labels >> task) & 1)

    def compute(self) -> dict[str, float]:
        """Returns `{"AUC": …}`, plus `AUC_task0` and so on for several tasks. An undefined AUC is NaN."""
        values = []
        for auc in self._aucs:
            none = torch.zeros(0, device=auc.device)
            auc.update(none, none)  # torchmetrics gathers nothing from a rank without an update
            values.append(float(auc.compute()))
            auc.reset()
        unknown = [task for task, value in enumerate(values) if math.isnan(value)]
        if unknown:
            tasks = f" of task {', '.join(map(str, unknown))}" if self._num_tasks > 1 else ""
            warn_once(
                f"all labels{tasks} in an evaluation are of one class, which has no AUC: shown as nan and "
                "left out of the mean. More samples may have both (TrainerArgs.max_eval_iters)"
            )
        known = [value for value in values if not math.isnan(value)]
        figures = {"AUC": sum(known) / len(known) if known else math.nan}
        if self._num_tasks > 1:
            figures |= {f"AUC_task{task}": value for task, value in enumerate(values)}
        return figures


class _TaskAUC(BinaryAUROC):
    """One task's AUC from any real scores. If all labels are of one class, it is NaN, not BinaryAUROC's 0."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Adds scores and labels unchanged. BinaryAUROC would squash a batch that has a score above 1."""
        self.preds.append(preds.float())
        self.target.append(target.long())

    def compute(self) -> torch.Tensor:
        """Returns a scalar over the labels of all ranks, which torchmetrics has already gathered."""
        labels = dim_zero_cat(self.target)
        if labels.numel() == 0 or labels.min() == labels.max():
            return torch.tensor(math.nan, device="cpu")
        return super().compute()


def parsed_names(names: Sequence[str], setting: str) -> list[tuple[str, int]]:
    """Returns the kind of each metric, in lower case, and its k.

    A name is "HitRate@k", "HR@k", "Recall@k", or "NDCG@k". Case does not matter. Errors name `setting`.

    Raises:
        ValueError: a name has another form.
    """
    parsed = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            expected = "HitRate@k, HR@k, Recall@k or NDCG@k with k of at least 1"
            raise ValueError(f"{setting} = {name!r}: expected {expected}")
        parsed.append((match[1].lower(), int(match[2])))
    return parsed


class RetrievalMetrics(EvaluationMetrics):
    """Mean HitRate, Recall, and NDCG over the samples of all ranks, each counted once, without padding rows.

    Args:
        names: names that `parsed_names` accepts, with k of at most `num_retrieved`.
        num_retrieved: number of items in a ranking.
        device: device of the outputs.

    Raises:
        ValueError: a name is unknown, or its k exceeds `num_retrieved`.
    """

    def __init__(self, names: Sequence[str], num_retrieved: int, device: torch.device) -> None:
        setting = "TrainerArgs.eval_metrics"
        self._parsed = parsed_names(names, setting)
        self._names = list(names)
        for name, (_, k) in zip(names, self._parsed, strict=True):
            expected = f"k of at most top_k_for_generation = {num_retrieved}"
            require(k <= num_retrieved, setting, name, expected)
        self._sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)

    def update(self, output: Any) -> None:
        """Adds the rankings `items` `[samples, num_retrieved]` and the right items `targets` `[samples]`.

        Raises:
            ValueError: the output has no targets.
        """
        if output.targets is None:
            raise ValueError("the batch has no target_items, so nothing says which retrieved items are right")
        self.update_rankings(output.items, output.targets)

    def update_rankings(self, items: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds rankings `[samples, num_retrieved]`, best item first, and the right items `[samples]`."""
        found = items == targets.unsqueeze(1)
        places = found.int().argmax(1)
        hits = found.any(1)
        discounted = 1 / (places + 2).double().log2()
        for index, (kind, k) in enumerate(self._parsed):
            found_in_k = hits & (places < k)
            self._sums[index] += (discounted * found_in_k if kind == "ndcg" else found_in_k).sum()
        self._sums[-1] += len(places)

    def compute(self) -> dict[str, float]:
        """Returns each metric's mean by its given name, or NaN if no rank had a sample. Collective."""
        dist.all_reduce(self._sums)
        *sums, count = self._sums.tolist()
        self._sums.zero_()
        return {
            name: value / count if count else float("nan")
            for name, value in zip(self._names, sums, strict=True)
        }
