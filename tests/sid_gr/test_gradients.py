"""The shuffler does not change what a step learns."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from commons.datasets import SIDBatch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import TransformerConfig, transformer_flops
from sid_gr import batch_shuffler  # noqa: F401
from tests.gradient_comparison import Comparison, check_equal, compare
from tests.sid_gr.sid_samples import CONTEXTUAL_VOCABULARY, ITEM_CODES, Sample, sid_batch, sid_gr_model

ROWS = 6
DECODER = TransformerConfig(2, 12, 4, 2, 5, 48, skips_masked=True)
any_model = pytest.mark.parametrize(
    ("num_candidates", "share_lm_head"),
    [(1, False), (0, False), (1, True)],
    ids=["last item", "history", "shared head"],
)
SHUFFLER = {"type": "sid_gr", "flops": partial(transformer_flops, DECODER)}


def _batch(num_real: int, num_candidates: int) -> SIDBatch:
    """This rank's batch: samples of very different lengths, the long ones on the first rank."""
    rng = np.random.default_rng(dist.get_rank())

    def sample(items: int) -> Sample:
        rows = rng.integers(0, len(ITEM_CODES), items + 1).tolist()
        split = 0 if num_candidates == 0 else max(len(rows) - num_candidates, 0)
        return Sample(rows[:split], rows[split:], [int(rng.integers(0, CONTEXTUAL_VOCABULARY))])

    longest = 40 if dist.get_rank() == 0 else 8
    return sid_batch([sample(int(items)) for items in rng.integers(0, longest, num_real)], ROWS)


def _compare(num_real: tuple[int, ...], num_candidates: int, share_lm_head: bool) -> Comparison:
    make_model = partial(sid_gr_model, share_lm_head=share_lm_head)
    return compare(make_model, "none", SHUFFLER, _batch(num_real[dist.get_rank()], num_candidates))


@any_model
@pytest.mark.parametrize(
    "num_real", [(6, 6), (6, 3), (5, 0), (4, 6, 1)], ids=["complete", "incomplete", "one rank empty", "three"]
)
def test_gradients_are_equal_with_and_without_the_shuffler(pools, num_real, num_candidates, share_lm_head):
    results = pools(len(num_real)).run(_compare, num_real, num_candidates, share_lm_head)
    check_equal(results, has_loss=True)


CAP = 60  # the longest sample has more
MICRO_BATCHES = {**SHUFFLER, "max_tokens_per_micro_batch": CAP}


def _compare_in_micro_batches(
    num_real: tuple[int, ...], num_candidates: int, share_lm_head: bool, config: dict[str, Any]
) -> tuple[Comparison, int]:
    batch = _batch(num_real[dist.get_rank()], num_candidates)
    needed = BatchShufflerFactory.create("identity", max_tokens_per_micro_batch=CAP).plan(batch)
    make_model = partial(sid_gr_model, share_lm_head=share_lm_head)
    return compare(make_model, "none", config, batch), needed.num_micro_batches


@any_model
@pytest.mark.parametrize(
    ("num_real", "config"),
    [
        ((6, 6), MICRO_BATCHES),
        ((6, 1), {**MICRO_BATCHES, "equal_rows": False, "partitioner": "rebalance"}),
        ((5, 0), {**MICRO_BATCHES}),
        ((4, 6, 1), MICRO_BATCHES),
        ((6, 6), {"type": "identity", "max_tokens_per_micro_batch": CAP}),
        ((5, 0, 6), {"type": "identity", "max_tokens_per_micro_batch": CAP}),
    ],
)
def test_gradients_in_micro_batches_are_those_of_whole_steps(
    pools, num_real, num_candidates, share_lm_head, config
):
    results = pools(len(num_real)).run(
        _compare_in_micro_batches, num_real, num_candidates, share_lm_head, config
    )
    check_equal([comparison for comparison, _ in results], has_loss=True)
    assert len({needed for _, needed in results}) > 1  # as loaded, ranks would need other numbers
