"""The demo's replay places samples as the stage does on real ranks."""

import numpy as np
import pytest
import torch.distributed as dist

import hstu.batch_shuffler  # noqa: F401  registers "hstu"
from benchmarks.batches import make_history_batch
from benchmarks.demo.replay import place_rows
from benchmarks.demo.training import ARMS, AS_LOADED, DEFAULT
from commons.datasets import HSTUBatch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from commons.training import TrainerArgs
from tests.commons.training.internals import make_extensions

RANKS, ROWS = 2, 8
LENGTHS = np.random.default_rng(0).lognormal(5, 1.2, RANKS * ROWS).clip(1, 2048).astype(int).tolist()


def test_the_default_is_what_one_setting_switches_on():
    assert list(ARMS)[:2] == [AS_LOADED, DEFAULT]
    assert ARMS[DEFAULT] == {"enable_balanced_shuffler": True}


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != AS_LOADED])
def test_ranks_are_replayed_with_the_samples_that_the_stage_gives_them(pools, arm):
    by_rank = pools(RANKS).run(_replayed_and_shuffled, arm)
    for replayed, shuffled in by_rank:
        assert replayed == shuffled
    rows = [len(replayed) for replayed, _ in by_rank]
    moved = sum(
        set(replayed) != set(LENGTHS[rank * ROWS :][:ROWS]) for rank, (replayed, _) in enumerate(by_rank)
    )
    assert moved == RANKS
    assert rows == [ROWS] * RANKS or "unequal rows" in arm


def _replayed_and_shuffled(arm: str) -> tuple[list[int], list[int]]:
    """Returns the histories of this rank by the replay, and by the stage."""
    args = TrainerArgs(train_batch_size=ROWS, **ARMS[arm])
    settings = {"extensions": make_extensions(args), **args.balance_settings}
    shuffler = BatchShufflerFactory.create("hstu", flops=HSTUFlops(2, 128, 2, 64), **settings)
    rank = dist.get_rank()
    mine = make_history_batch(LENGTHS[rank * ROWS :][:ROWS], seed=rank)
    replayed = place_rows(make_history_batch(LENGTHS, seed=0), shuffler, RANKS)[rank]
    return _histories(replayed), _histories(shuffler.shuffle(mine))


def _histories(batch: HSTUBatch) -> list[int]:
    return batch.features["item"].lengths().tolist()
