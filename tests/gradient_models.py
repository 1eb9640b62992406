"""Models whose gradients are compared, with batches on which the ranks' loads differ widely."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hstu.batch_shuffler  # noqa: F401
import sid_gr.batch_shuffler  # noqa: F401
from commons.perf_model import HSTUFlops, TransformerConfig, transformer_work
from commons.sequence_batch import BaseBatch
from hstu.models import RankingHeadConfig
from tests.hstu import hstu_samples, retrieval_samples
from tests.hstu.hstu_samples import VOCABULARY
from tests.sid_gr import sid_samples

ROWS = 6
NUM_TASKS = 3


@dataclass(frozen=True)
class ModelCase:
    """How to build a model, its samples and its batches, which have padding up to `ROWS` rows.

    The cap is of tokens per micro-batch, of which the longest sample has more.
    """

    make_model: Callable[[], torch.nn.Module]
    make_sample: Callable[[np.random.Generator, int, bool], Any]
    make_batch: Callable[[Sequence[Any]], BaseBatch]
    shuffler: dict[str, Any]
    cap: int = 50
    pipelines: tuple[str, str] = ("none", "native")

    def samples(self, seed: int, num_real: int, labeled: bool = True) -> list[Any]:
        """Returns samples of which those of seeds divisible by 10, and so of rank 0, are the longest."""
        rng = np.random.default_rng(seed)
        longest = 40 if seed % 10 == 0 else 8
        return [self.make_sample(rng, int(items), labeled) for items in rng.integers(0, longest, num_real)]

    def batch(self, num_real: Sequence[int], labeled: bool) -> BaseBatch:
        """Returns the batch of this rank, which has `num_real[rank]` samples."""
        rank = dist.get_rank()
        return self.make_batch(self.samples(rank, num_real[rank], labeled))


def _ranking_sample(rng: np.random.Generator, items: int, labeled: bool) -> hstu_samples.Sample:
    actions = rng.integers(0, hstu_samples.NUM_CLASSES, items).tolist()
    return hstu_samples.Sample(
        user=[int(rng.integers(0, VOCABULARY))],
        tags=rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist(),
        items=rng.integers(0, VOCABULARY, items).tolist(),
        actions=actions,
        num_candidates=0,
        labels=actions if labeled else [],
    )


def _sample_with_candidates(rng: np.random.Generator, items: int, labeled: bool) -> hstu_samples.Sample:
    """Returns a sample whose actions are bits of three tasks, and whose candidates alone have labels."""
    sample = _ranking_sample(rng, items, labeled)
    actions = rng.integers(0, 2**NUM_TASKS, items).tolist()
    num_candidates = min(int(rng.integers(0, 4)), items)
    labels = actions[items - num_candidates :] if labeled else []
    return replace(sample, actions=actions, num_candidates=num_candidates, labels=labels)


def _ranking_batch(samples: Sequence[hstu_samples.Sample]) -> BaseBatch:
    padding = [hstu_samples.EMPTY] * (ROWS - len(samples))
    batch = hstu_samples.hstu_batch([*samples, *padding])
    batch.actual_batch_size = len(samples)
    return batch


def _retrieval_sample(rng: np.random.Generator, items: int, labeled: bool) -> retrieval_samples.Sample:
    return retrieval_samples.Sample(
        items=rng.integers(0, VOCABULARY, items).tolist(),
        actions=rng.integers(0, retrieval_samples.NUM_ACTIONS, items).tolist(),
        negatives=rng.integers(0, VOCABULARY, 20).tolist(),
        user=[int(rng.integers(0, VOCABULARY))],
        num_labels=None if labeled else 0,
    )


def _retrieval_batch(samples: Sequence[retrieval_samples.Sample]) -> BaseBatch:
    return retrieval_samples.retrieval_batch(samples, num_padding=ROWS - len(samples))


def _sid_sample(rng: np.random.Generator, items: int, labeled: bool, only_last: bool) -> sid_samples.Sample:
    rows = rng.integers(0, len(sid_samples.ITEM_CODES), items + 1).tolist()
    split = items if only_last else 0
    return sid_samples.Sample(
        rows[:split], rows[split:], [int(rng.integers(0, sid_samples.CONTEXTUAL_VOCABULARY))]
    )


def _sid_case(only_last: bool) -> ModelCase:
    """Returns a case with a loss on the last item and a shared head, or on all items and a head each."""
    decoder = TransformerConfig(2, 12, 4, 2, 5, 48)
    return ModelCase(
        partial(sid_samples.sid_gr_model, share_lm_head=only_last),
        partial(_sid_sample, only_last=only_last),
        partial(sid_samples.sid_batch, batch_size=ROWS),
        {"type": "sid_gr", "flops": partial(transformer_work, decoder)},
        cap=60,
        pipelines=("none", "none"),
    )


def _with_candidates(is_causal: bool) -> ModelCase:
    model = partial(
        hstu_samples.ranking_model,
        RankingHeadConfig((8, NUM_TASKS), num_tasks=NUM_TASKS),
        is_causal=is_causal,
    )
    flops = HSTUFlops(2, 16, 2, 4, is_causal)
    return ModelCase(model, _sample_with_candidates, _ranking_batch, {"type": "hstu", "flops": flops})


_HSTU = {"type": "hstu", "flops": HSTUFlops(2, 16, 2, 4)}
_RECOMPUTING = partial(hstu_samples.ranking_model, recompute_input_layernorm=True, recompute_input_silu=True)
CASES = {
    "ranking": ModelCase(_RECOMPUTING, _ranking_sample, _ranking_batch, _HSTU),
    "retrieval": ModelCase(retrieval_samples.retrieval_model, _retrieval_sample, _retrieval_batch, _HSTU),
    "ranking with candidates and tasks": _with_candidates(is_causal=True),
    "ranking, not causal": _with_candidates(is_causal=False),
    "sid_gr, last item": _sid_case(only_last=True),
    "sid_gr, all items": _sid_case(only_last=False),
}
