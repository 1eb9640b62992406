"""The cost of a step: collectives, synchronizations, bytes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.commons.distributed.counted_collectives import no_synchronization, recorded_collectives
from tests.commons.distributed.internals import Channel
from tests.commons.distributed.loaded_batches import BOTH, PAYLOAD, agreed, check_identical, many_fields
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler
from tests.commons.histories import FlopsShuffler, histories
from tests.drawn_batches import draw_batch
from tests.on_ranks import on_ranks


def test_what_waits_for_the_device_is_found_and_nothing_else():
    x = torch.tensor([1, 2, 3])
    for read in (
        lambda: x.tolist(),
        lambda: x.sum().item(),
        lambda: int(x[0]),
        lambda: bool((x > 0).all()),
        lambda: np.asarray(x),
        lambda: x[x > 1],
        lambda: x.repeat_interleave(x),
        lambda: x.to(torch.device("cpu")),
        lambda: torch.tensor([1, 2]),
        lambda: x.unique(),
    ):
        with pytest.raises(AssertionError, match="waits for the device"), no_synchronization():
            read()
    with no_synchronization():
        rows = torch.from_numpy(np.array([2, 0])).to(x.device, non_blocking=True)
        assert x.index_select(0, rows).repeat_interleave(x[:2], output_size=3).int().shape == (3,)


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(3)
def test_a_step_takes_one_collective_to_plan_and_one_to_exchange_and_never_waits_for_the_device(exchange):
    shuffler = DictShuffler(exchange=exchange)
    shuffler.shuffle(many_fields(0))  # agrees on the fields, and fills the caches that depend on them
    batch = many_fields(1)
    with recorded_collectives() as calls:
        plan = shuffler.plan(batch)
        assert plan.moves
        with no_synchronization():
            shuffler.exchange(batch, plan)
    (of_plan, planning), (of_exchange, moving) = calls
    assert of_plan == "all_gather" and isinstance(planning["group"], Channel)
    assert of_exchange == PAYLOAD[exchange]
    assert moving["group"] is shuffler.group.group_for("exchange", torch.device("cpu"))


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(2)
def test_nothing_is_communicated_where_every_sample_stays(exchange):
    shuffler = agreed(FieldShuffler(exchange=exchange, partitioner="rebalance"))
    batch = draw_batch(np.random.default_rng(0), 0, 4, 4)  # the same on each rank
    plan = shuffler.plan(batch)
    assert not plan.moves
    with recorded_collectives() as calls, no_synchronization():
        moved = shuffler.exchange(batch, plan)
    assert calls == [] and plan.traffic == (0, 0)
    check_identical(moved, batch)


def _bytes_of_steps(exchange: str) -> list[tuple[int, int, int, int]]:
    """Returns for each step the bytes sent and received: of the collective's tensors, then by `traffic`."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shuffler = FlopsShuffler(partitioner="rebalance", exchange=exchange)
    rng = np.random.default_rng(rank)
    steps = []
    for _ in range(3):
        batch = histories(rng.lognormal(5, 1.2, 32).clip(1, 4096), rng)
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
        steps.append((*really, *plan.traffic))
    return steps


def test_traffic_is_exact_and_all_to_all_sends_at_most_a_quarter_of_an_all_gather(pools):
    straight, gathered = (
        np.array(pools(4).run(_bytes_of_steps, way)) for way in ("all_to_all", "all_gather")
    )
    for steps in (straight, gathered):
        assert np.array_equal(steps[..., :2], steps[..., 2:])
    assert straight[..., 0].sum() == straight[..., 1].sum()
    assert straight[..., 0].mean() <= gathered[..., 1].mean() / 4
