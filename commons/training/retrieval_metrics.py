"""HitRate, Recall and NDCG of retrieved items."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commons.training.evaluation_metrics import EvaluationMetrics
from commons.training.training_args import require

# Of one sample with one right item, by the item's place in the ranking, 0 for the first.
_GAINS = {
    "hr": lambda places: torch.ones_like(places, dtype=torch.float64),
    "hitrate": lambda places: torch.ones_like(places, dtype=torch.float64),
    # One item is right, so recall, the share of right items that are found, is whether it is found.
    "recall": lambda places: torch.ones_like(places, dtype=torch.float64),
    "ndcg": lambda places: 1 / (places + 2).double().log2(),
}
_NAME = re.compile(rf"({'|'.join(_GAINS)})@([1-9][0-9]*)", re.IGNORECASE)


def parsed_names(names: Sequence[str], setting: str) -> list[tuple[str, int]]:
    """For each name the kind of metric, in small letters, and k.

    Args:
        names: "HitRate@k" or "HR@k", "Recall@k" or "NDCG@k", in any case of letters.
        setting: where they come from, for messages.

    Raises:
        ValueError: another name, or a single string.
    """
    require(not isinstance(names, str), setting, names, 'a tuple, as in ("NDCG@10",)')
    parsed = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            expected = "HitRate@k, HR@k, Recall@k or NDCG@k with k of at least 1"
            raise ValueError(f"{setting} = {name!r}: expected {expected}")
        parsed.append((match[1].lower(), int(match[2])))
    return parsed


class RetrievalMetrics(EvaluationMetrics):
    """Means over all samples of all ranks, each sample counted once; padding rows are no samples.

    Args:
        names: as `parsed_names` takes them; k is at most `num_retrieved`.
        num_retrieved: items in a ranking.
        device: of the outputs.

    Raises:
        ValueError: an unknown name, or a k above `num_retrieved`.
    """

    def __init__(self, names: Sequence[str], num_retrieved: int, device: torch.device) -> None:
        setting = "TrainerArgs.eval_metrics"
        self._gains = [(_GAINS[kind], k) for kind, k in parsed_names(names, setting)]
        self._names = list(names)
        for name, (_, k) in zip(names, self._gains, strict=True):
            expected = f"k of at most top_k_for_generation = {num_retrieved}"
            require(k <= num_retrieved, setting, name, expected)
        self._sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)

    def update(self, output: Any) -> None:
        """Takes rankings `items` `[samples, num_retrieved]` and the right items `targets` `[samples]`.

        Raises:
            ValueError: there are no targets.
        """
        if output.targets is None:
            raise ValueError("the batch has no target_items, so nothing says which retrieved items are right")
        found = output.items == output.targets.unsqueeze(1)
        places = found.int().argmax(1)
        hits = found.any(1)
        for index, (gain, k) in enumerate(self._gains):
            self._sums[index] += (gain(places) * (hits & (places < k))).sum()
        self._sums[-1] += len(places)

    def compute(self) -> dict[str, float]:
        """The mean of each metric, by its name as given; NaN if no rank had a sample. Collective."""
        dist.all_reduce(self._sums)
        *sums, count = self._sums.tolist()
        self._sums.zero_()
        return {
            name: value / count if count else float("nan")
            for name, value in zip(self._names, sums, strict=True)
        }
