"""The cost of a step: collectives, synchronizations, bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed.exchange import EXCHANGES
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.placement import place
from commons.distributed.shuffler_settings import ShufflerSettings
from tests.commons.distributed.counted_collectives import no_synchronization, recorded_collectives
from tests.commons.distributed.loaded_batches import (
    BOTH,
    FLOPS,
    agreed,
    check_identical,
    history_batch,
    lopsided_batch,
)
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler
from tests.drawn_batches import draw_batch

MOVIELENS_100K = Path(__file__).parents[4] / "shared/data/ml-100k"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.repeat_interleave(x),
        lambda x: x.to(torch.device("cpu")),
        lambda x: torch.tensor([1, 2]),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
    ],
)
def test_synchronizations_are_found(read):
    with pytest.raises(AssertionError, match="waits for the device"), no_synchronization():
        read(torch.tensor([1, 2, 3]))


def test_asynchronous_work_passes():
    x = torch.tensor([1, 2, 3])
    with no_synchronization():
        rows = torch.from_numpy(np.array([2, 0])).to(x.device, non_blocking=True)
        assert x.index_select(0, rows).repeat_interleave(x[:2], output_size=3).int().shape == (3,)


def _many_fields(seed: int) -> dict:
    """Draws jagged fields of many dtypes, two with weights, and dense ones; rank 1 has the long rows."""
    rank = dist.get_rank()
    rng = np.random.default_rng((seed, rank))

    def keyed(keys: list[str], dtype: torch.dtype, weights: torch.dtype | None = None) -> KeyedJaggedTensor:
        lengths = torch.from_numpy(rng.integers(0, 5, len(keys) * 6))
        values = torch.from_numpy(rng.integers(0, 100, int(lengths.sum()))).to(dtype)
        return KeyedJaggedTensor(
            keys, values, lengths=lengths, weights=None if weights is None else values.to(weights)
        )

    return {
        "ids": keyed(["a", "b", "c"], torch.int64),
        "times": keyed(["t"], torch.float32, torch.float64),
        "jagged": JaggedTensor(torch.arange(9), lengths=torch.tensor([1, 0, 2, 3, 0, 3])),
        "nested": torch.nested.nested_tensor_from_jagged(
            torch.arange(8.0), torch.tensor([0, 1, 1, 4, 6, 7, 8])
        ),
        "codes": keyed(["d", "e"], torch.int16, torch.float16),
        "workload": torch.from_numpy(rng.integers(1, 100, 6) * (1 + 100 * rank)),
        "price": torch.rand(6, 3, dtype=torch.float64),
        "flag": torch.rand(6) > 0.5,
        "embedding": torch.rand(6, 2, 2).bfloat16(),
    }


def _collectives_of_a_step(exchange: str, verify: bool) -> list[str]:
    shuffler = DictShuffler(exchange=exchange, verify=verify, max_tokens_per_micro_batch=9)
    shuffler.shuffle(_many_fields(0))  # agrees on the fields, and fills the caches that depend on them
    names = {id(shuffler.planner._channel): "planning", id(shuffler._checks): "checks"}
    names[id(shuffler.group.exchange_group(torch.device("cpu")))] = "exchange"
    batch = _many_fields(1)
    with recorded_collectives() as calls:
        plan = shuffler.plan(batch)
        assert plan.moves and plan.num_micro_batches > 1
        if verify:
            shuffler.exchange(batch, plan)
        else:
            with no_synchronization():
                shuffler.micro_batches(shuffler.exchange(batch, plan), plan)
    return [f"{name} on {names[id(arguments['group'])]}" for name, arguments in calls]


PAYLOAD = {"all_gather": "all_gather_into_tensor on exchange", "all_to_all": "all_to_all_single on exchange"}
PLANNING = "all_gather on planning"
CHECKS = "all_gather on checks"


@pytest.mark.parametrize("exchange", BOTH)
def test_a_step_takes_one_collective_to_plan_and_one_to_exchange_and_never_waits_for_the_device(
    pools, exchange
):
    for calls in pools(3).run(_collectives_of_a_step, exchange, False):
        assert calls == [PLANNING, PAYLOAD[exchange]]


@pytest.mark.parametrize("exchange", BOTH)
def test_verifying_takes_one_more_to_plan_and_two_to_exchange(pools, exchange):
    for calls in pools(2).run(_collectives_of_a_step, exchange, True):
        assert calls == [PLANNING, PLANNING, CHECKS, PAYLOAD[exchange], CHECKS]


def _collectives_there_and_back(exchange: str, cap: int | None) -> list[list[str]]:
    """Returns the collectives of a step, and of two ways back."""
    shuffler = agreed(FieldShuffler(exchange=exchange, max_tokens_per_micro_batch=cap, verify=True))
    batch = lopsided_batch()
    with recorded_collectives() as there:
        plan = shuffler.plan(batch)
        moved = shuffler.exchange(batch, plan)
    assert plan.moves
    with recorded_collectives() as calls, no_synchronization():
        micro_batches = shuffler.micro_batches(moved, plan)
    assert calls == []
    assert cap is None or len(micro_batches) > 1
    counted = [there]
    for values in (micro_batches, [micro_batch.small for micro_batch in micro_batches]):
        with recorded_collectives() as back:
            shuffler.unshuffle(values if cap else values[0], plan)
        counted.append(back)
    return [[name for name, _ in calls] for calls in counted]


@pytest.mark.parametrize("exchange", BOTH)
def test_micro_batches_take_no_collective_and_never_wait_for_the_device(pools, exchange):
    whole, divided = (pools(3).run(_collectives_there_and_back, exchange, cap) for cap in (None, 13))
    assert divided == whole
    assert all(map(len, whole[0]))


def _collectives_where_nothing_moves(exchange: str) -> list[str]:
    shuffler = agreed(FieldShuffler(exchange=exchange, partitioner="rebalance"))
    batch = draw_batch(np.random.default_rng(0), 0, 4, 4)  # the same on each rank
    plan = shuffler.plan(batch)
    assert not plan.moves
    with recorded_collectives() as calls, no_synchronization():
        moved = shuffler.exchange(batch, plan)
    check_identical(moved, batch)
    assert shuffler.traffic(plan) == (0, 0)
    return calls


@pytest.mark.parametrize("exchange", BOTH)
def test_nothing_is_communicated_where_every_sample_stays(pools, exchange):
    assert pools(2).run(_collectives_where_nothing_moves, exchange) == [[], []]


def _collectives_of_unshuffle() -> list[list[str]]:
    """Returns the collectives of a first call for each kind of values, and of a second one."""
    shuffler = agreed(FieldShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    kinds = moved.small, {"small": moved.small, "matrix": moved.matrix}, moved.weighted, moved
    counted = []
    for values in (*kinds, *kinds):
        with recorded_collectives() as calls:
            shuffler.unshuffle(values, plan)
        counted.append([name for name, _ in calls])
    with no_synchronization():
        shuffler.unshuffle(moved.small[: moved.num_samples].clone(), plan)
    return counted


def test_unshuffle_takes_one_collective_and_one_more_for_lengths_and_for_a_first_call(pools):
    one, two = ["all_to_all_single"], ["all_to_all_single"] * 2
    later = [one, one, two, two]
    first = [["all_gather", *calls] for calls in later]
    assert pools(2).run(_collectives_of_unshuffle) == [first + later] * 2


def _bytes_of_steps(exchange: str) -> list[tuple[int, int, int, int]]:
    """Returns for each step the bytes sent and received: of the collective's tensors, then by `traffic`."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shuffler = FieldShuffler(partitioner="rebalance", exchange=exchange)
    rng = np.random.default_rng(rank)
    steps = []
    for _ in range(3):
        batch = history_batch(rng, 32)
        plan = shuffler.plan(batch)
        assert plan.moves
        with recorded_collectives() as calls:
            shuffler.exchange(batch, plan)
        ((_, arguments),) = calls
        if exchange == "all_to_all":
            # Nothing that stays is in either tensor.
            assert arguments["input_split_sizes"][rank] == arguments["output_split_sizes"][rank] == 0
            really = arguments["input"].nbytes, arguments["output"].nbytes
        else:
            mine, every = arguments["input_tensor"].nbytes, arguments["output_tensor"].nbytes
            really = mine * (num_ranks - 1), every - mine
        steps.append((*really, *shuffler.traffic(plan)))
    return steps


def test_traffic_is_exact_and_all_to_all_sends_at_most_a_quarter_of_an_all_gather(pools):
    straight, gathered = (
        np.array(pools(4).run(_bytes_of_steps, way)) for way in ("all_to_all", "all_gather")
    )
    for steps in (straight, gathered):
        assert np.array_equal(steps[..., :2], steps[..., 2:])
    assert straight[..., 0].sum() == straight[..., 1].sum()
    assert straight[..., 0].mean() <= gathered[..., 1].mean() / 4


def test_all_to_all_sends_at_most_a_hundredth_of_an_all_gather_at_64_ranks_of_movielens():
    if not (MOVIELENS_100K / "u.data").is_file():
        pytest.skip(f"no MovieLens 100K in {MOVIELENS_100K}")
    ranks, rows = 64, 32
    ratings = np.bincount(np.loadtxt(MOVIELENS_100K / "u.data", usecols=0, dtype=np.int64))[1:]
    rng = np.random.default_rng(0)
    sent, received = [], []
    for _ in range(3):
        lengths = rng.choice(ratings, ranks * rows)
        tokens = 2 * lengths + 1
        workloads = FLOPS.per_sample(tokens)
        elements = np.stack([tokens, lengths], 1)  # user, items and actions; labels
        size = 8 * elements.sum(1) + 4 * 4  # int64 values, and the lengths of four keys
        each = np.full(ranks, rows)
        loaded = LoadedSamples(each, each, workloads, tokens, lengths, elements, size, elements)
        plan = place(loaded, ShufflerSettings("rebalance"))
        sent += [EXCHANGES["all_to_all"].traffic(plan, rank).sent for rank in range(ranks)]
        received += [EXCHANGES["all_gather"].traffic(plan, rank).received for rank in range(ranks)]
    assert 0 < np.mean(sent) <= np.mean(received) / 100
