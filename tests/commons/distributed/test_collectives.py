"""What a step costs: collectives, synchronisations, bytes."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.exchange import EXCHANGES
from commons.distributed.placement import LoadedSamples, place
from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import ShufflerSettings
from tests.commons.distributed.loaded_batches import (
    BOTH,
    FLOPS,
    agreed,
    check_identical,
    history_batch,
    lopsided_batch,
)
from tests.commons.distributed.test_shuffle import QuickShuffler
from tests.drawn_batches import draw_batch

MOVIELENS_100K = Path(__file__).parents[4] / "shared/data/ml-100k"


COMMUNICATION = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
]


@contextmanager
def _collectives():
    """Every call of torch.distributed that communicates: its name, and its arguments by name."""
    calls = []

    def recorded(name, function):
        signature = inspect.signature(function)

        def call(*args, **kwargs):
            calls.append((name, signature.bind(*args, **kwargs).arguments))
            return function(*args, **kwargs)

        return call

    functions = {name: recorded(name, getattr(dist, name)) for name in COMMUNICATION if hasattr(dist, name)}
    with mock.patch.multiple(dist, **functions):
        yield calls


class _SynchronisingOps(TorchDispatchMode):
    """Fails on operations that, on CUDA, make the host wait for the device to learn a value or a size."""

    NAMES = (
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "_unique",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        bad = name == "item" or any(name.startswith(prefix) for prefix in self.NAMES)
        if name == "repeat_interleave":
            bad = kwargs.get("output_size") is None
        elif name in ("index", "index_put", "index_put_"):
            bad = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        assert not bad, f"{func} waits for the device"
        return func(*args, **kwargs)


class _SynchronisingCalls(TorchFunctionMode):
    """Fails on functions that read a tensor on the host, or copy to the device from pageable memory."""

    NAMES = ("__array__", "__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Nothing is read of, or copied from, a tensor without elements.
        bad = name in self.NAMES and isinstance(args[0], torch.Tensor) and args[0].numel() > 0
        bad |= func in (torch.tensor, torch.as_tensor)
        if func is torch.Tensor.to:
            target = kwargs.get("device", args[1] if len(args) > 1 else None)
            bad = isinstance(target, torch.device | str) and not kwargs.get("non_blocking", False)
        assert not bad, f"{name} waits for the device"
        return func(*args, **kwargs)


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
def test_the_checks_for_synchronisation_find_it(read):
    with (
        pytest.raises(AssertionError, match="waits for the device"),
        _SynchronisingOps(),
        _SynchronisingCalls(),
    ):
        read(torch.tensor([1, 2, 3]))


def test_the_checks_for_synchronisation_let_asynchronous_work_pass():
    x = torch.tensor([1, 2, 3])
    with _SynchronisingOps(), _SynchronisingCalls():
        rows = torch.from_numpy(np.array([2, 0])).to(x.device, non_blocking=True)
        assert x.index_select(0, rows).repeat_interleave(x[:2], output_size=3).int().shape == (3,)


class DictShuffler(QuickShuffler):
    """The workload is an entry of a dict."""

    def get_workloads(self, batch):
        return batch["workload"]


def _many_fields(seed: int) -> dict:
    """Three keyed fields of other dtypes, two with weights, and four dense ones; rank 1 has the long rows."""
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
        "codes": keyed(["d", "e"], torch.int16, torch.float16),
        "workload": torch.from_numpy(rng.integers(1, 100, 6) * (1 + 100 * rank)),
        "price": torch.rand(6, 3, dtype=torch.float64),
        "flag": torch.rand(6) > 0.5,
        "embedding": torch.rand(6, 2, 2).bfloat16(),
    }


def _collectives_of_a_step(exchange: str, verify: bool) -> list[str]:
    shuffler = DictShuffler(exchange=exchange, verify=verify)
    shuffler.shuffle(_many_fields(0))  # agrees on the fields, and fills the caches that depend on them
    names = {id(shuffler.group.planning): "planning", id(shuffler.group.exchange): "exchange"}
    names[id(shuffler.group.checks)] = "checks"
    batch = _many_fields(1)
    with _collectives() as calls:
        plan = shuffler.plan(batch)
        assert plan.moves
        if verify:
            shuffler.exchange(batch, plan)
        else:
            with _SynchronisingOps(), _SynchronisingCalls():
                shuffler.exchange(batch, plan)
    return [f"{name} on {names[id(arguments['group'])]}" for name, arguments in calls]


PAYLOAD = {"all_gather": "all_gather_into_tensor on exchange", "all_to_all": "all_to_all_single on exchange"}


@pytest.mark.parametrize("exchange", BOTH)
def test_a_step_takes_one_collective_to_plan_and_one_to_exchange_and_never_waits_for_the_device(
    pools, exchange
):
    expected = ["all_gather_into_tensor on planning", PAYLOAD[exchange]]
    for calls in pools(3).run(_collectives_of_a_step, exchange, False):
        assert calls == expected


@pytest.mark.parametrize("exchange", BOTH)
def test_checking_takes_one_more_to_plan_and_two_to_exchange(pools, exchange):
    planning = "all_gather_into_tensor on planning"
    checks = "all_gather_into_tensor on checks"
    expected = [planning, planning, checks, PAYLOAD[exchange], checks]
    for calls in pools(2).run(_collectives_of_a_step, exchange, True):
        assert calls == expected


def _collectives_of_what_stays(exchange: str) -> list[str]:
    shuffler = agreed(QuickShuffler(exchange=exchange, partitioner="rebalance"))
    batch = draw_batch(np.random.default_rng(0), 0, 4, 4)  # the same on each rank
    plan = shuffler.plan(batch)
    assert not plan.moves
    with _collectives() as calls, _SynchronisingOps(), _SynchronisingCalls():
        moved = shuffler.exchange(batch, plan)
    check_identical(moved, batch)
    assert shuffler.traffic(plan) == (0, 0)
    return calls


@pytest.mark.parametrize("exchange", BOTH)
def test_where_every_sample_stays_nothing_is_communicated(pools, exchange):
    assert pools(2).run(_collectives_of_what_stays, exchange) == [[], []]


def _collectives_of_the_way_back() -> list[list[str]]:
    shuffler = agreed(QuickShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    counted = []
    for values in (moved.small, {"small": moved.small, "matrix": moved.matrix}, moved.weighted, moved):
        with _collectives() as calls:
            shuffler.unshuffle(values, plan)
        counted.append([name for name, _ in calls])
    with _SynchronisingOps(), _SynchronisingCalls():
        shuffler.unshuffle(moved.small[: moved.num_samples].clone(), plan)
    return counted


def test_the_way_back_takes_one_collective_and_one_more_for_lengths(pools):
    one, two = ["all_to_all_single"], ["all_to_all_single"] * 2
    assert pools(2).run(_collectives_of_the_way_back) == [[one, one, two, two]] * 2


def _bytes_of_steps(exchange: str) -> list[tuple[int, int, int, int]]:
    """Per step: bytes that the collective's tensors send and receive, and what `traffic` says of both."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shuffler = QuickShuffler(partitioner="rebalance", exchange=exchange)
    rng = np.random.default_rng(rank)
    steps = []
    for _ in range(4):
        batch = history_batch(rng, 32)
        plan = shuffler.plan(batch)
        assert plan.moves
        with _collectives() as calls:
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


def test_all_to_all_sends_what_it_says_and_a_quarter_of_an_all_gather_at_most(pools):
    straight, gathered = (
        np.array(pools(4).run(_bytes_of_steps, way)) for way in ("all_to_all", "all_gather")
    )
    for steps in (straight, gathered):
        assert np.array_equal(steps[..., :2], steps[..., 2:])
    assert straight[..., 0].sum() == straight[..., 1].sum()
    assert straight[..., 0].mean() <= gathered[..., 1].mean() / 4


def test_at_64_ranks_of_movielens_it_sends_a_hundredth_of_an_all_gather_at_most():
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
        each = np.full((ranks, 1), rows)
        loaded = LoadedSamples(workloads, tokens, size, each, each)
        placed = place(loaded, ShufflerSettings("rebalance"))
        whole = np.zeros_like(placed.rank), placed.rows, np.zeros(1, dtype=np.int64)
        facts = workloads, tokens, lengths, elements, size
        plan = ShufflePlan(each, each, *facts, placed.rank, placed.step, *whole)
        sent += [EXCHANGES["all_to_all"].traffic(plan, rank).sent for rank in range(ranks)]
        received += [EXCHANGES["all_gather"].traffic(plan, rank).received for rank in range(ranks)]
    assert 0 < np.mean(sent) <= np.mean(received) / 100
