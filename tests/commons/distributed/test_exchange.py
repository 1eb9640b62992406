"""What moves, by which way, and how it comes back."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets import HSTUBatch
from commons.distributed.exchange import EXCHANGES
from commons.distributed.placement import LoadedSamples, Placement
from commons.distributed.shuffle_plan import ShufflePlan
from commons.partition import step_ratios
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.test_shuffle import FieldShuffler, QuickShuffler, cases
from tests.drawn_batches import draw_batch, sample_contents

MOVIELENS_100K = Path(__file__).parents[4] / "shared/data/ml-100k"
FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=1, head_dim=128)
BOTH = sorted(EXCHANGES)


def check_identical(got, expected, where="batch") -> None:
    """Both are the same, bit for bit: -0.0 is not 0.0, and NaNs are equal if their bits are."""
    assert type(got) is type(expected), where
    if isinstance(got, TensorDictBase):
        assert got.batch_size == expected.batch_size, where
        got, expected = dict(got.items(True, True)), dict(expected.items(True, True))
    if isinstance(got, BaseBatch):
        for field in dataclasses.fields(got):
            check_identical(getattr(got, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(got, dict):
        assert list(got) == list(expected), where
        for key in got:
            check_identical(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(got, JaggedTensor | KeyedJaggedTensor):
        if isinstance(got, KeyedJaggedTensor):
            assert (got.keys(), got.stride()) == (expected.keys(), expected.stride()), where
        for part in ("lengths", "values", "weights_or_none"):
            check_identical(getattr(got, part)(), getattr(expected, part)(), f"{where}.{part}")
    elif isinstance(got, torch.Tensor) and got.is_nested:
        for part in ("offsets", "values"):
            check_identical(getattr(got, part)(), getattr(expected, part)(), f"{where}.{part}")
    elif isinstance(got, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        assert got.contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes(), where
    else:
        assert got == expected, where


def _agreed(shuffler, labels="keyed"):
    """The shuffler after a first step, which agrees on the fields: what follows are steps like any other."""
    shuffler.shuffle(draw_batch(np.random.default_rng(0), 0, 1, 1, labels))
    return shuffler


def _loaded(shuffler, case):
    """The case's batch of this rank as `plan` takes it, and as `exchange` does."""
    rank = dist.get_rank()
    mine = case.rows[rank]
    if mine is None:
        return None, shuffler.padding_batch()
    batch = draw_batch(np.random.default_rng((case.seed, rank)), 1000 * (rank + 1), *mine, case.labels)
    return batch, batch


def _exchange_both_ways(case):
    """On one rank: what it loaded, its samples in the plan, and what it got, which is the same both ways."""
    settings = {"equal_rows": case.equal_rows, "partitioner": case.partitioner}
    moved = []
    for exchange in BOTH:
        shuffler = _agreed(QuickShuffler(exchange=exchange, **settings), case.labels)
        batch, loaded = _loaded(shuffler, case)
        plan = shuffler.plan(batch)
        moved.append(shuffler.exchange(loaded, plan))
    check_identical(*moved)
    rank = dist.get_rank()
    assert (moved[0].batch_size, moved[0].num_samples) == (plan.rows[rank], plan.num_placed[rank])
    for name, field in moved[0].per_sample_fields().items():
        # Padding rows are empty, or zero.
        padding = (
            field[plan.num_placed[rank] :]
            if isinstance(field, torch.Tensor)
            else field.lengths().view(-1, moved[0].batch_size)[:, plan.num_placed[rank] :]
        )
        assert not padding.any(), name
    return ([] if batch is None else sample_contents(batch)), plan.partition[rank], sample_contents(moved[0])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_both_exchanges_give_the_same_bits_in_the_order_of_the_plan(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=15, deadline=None)
    @given(case=cases(num_ranks))
    def same(case):
        results = pool.run(_exchange_both_ways, case)
        every = [content for loaded, _, _ in results for content in loaded]
        for _, samples, got in results:
            assert got == [every[sample] for sample in samples]

    same()


# The way back


def _sample_ids(batch) -> list[int]:
    return batch.matrix[: batch.num_samples, 0, 0].long().tolist()


def _outputs(ids: list[int], num_padding: int, junk: bool = False) -> dict:
    """What a model may compute of samples, each of them a function of the sample's number; then padding.

    Lengths are others than in the batch. Junk in padding rows is what a model computes there.
    """
    rows = [_output_of(sample) for sample in ids]
    rows += [_output_of(-1 if junk else None)] * num_padding

    keyed = [torch.cat([row["keyed"][key] for row in rows] or [torch.zeros(0)]) for key in range(2)]
    keyed_lengths = [torch.tensor([len(row["keyed"][key]) for row in rows]) for key in range(2)]
    keyed_values = torch.cat(keyed).double()
    tokens = torch.cat([row["tokens"] for row in rows] or [_output_of(None)["tokens"]])
    return {
        "scores": torch.stack([row["scores"] for row in rows]) if rows else torch.zeros(0, 2, 3),
        "keyed": KeyedJaggedTensor(
            ["p", "q"],
            values=keyed_values.to(torch.int32),
            weights=keyed_values / 7,
            lengths=torch.cat(keyed_lengths).long(),
            stride=len(rows),
        ),
        "tokens": JaggedTensor(tokens, lengths=torch.tensor([len(row["tokens"]) for row in rows]).int()),
        "right": torch.tensor([row["right"] for row in rows], dtype=torch.bool),
        "step": 17,
    }


def _output_of(sample: int | None) -> dict:
    """One sample's; None for a padding row that has nothing in it."""
    if sample is None:
        return {
            "scores": torch.zeros(2, 3),
            "keyed": [torch.zeros(0)] * 2,
            "tokens": torch.zeros(0, 2).half(),
            "right": False,
        }
    rng = np.random.default_rng(sample + 1)
    bits = rng.integers(-(2**31), 2**31, (2, 3)).astype(np.int32)  # among them NaNs
    return {
        "scores": torch.from_numpy(bits).view(torch.float32),
        "keyed": [torch.from_numpy(rng.integers(0, 1000, rng.integers(0, 4))).float() for _ in range(2)],
        "tokens": torch.from_numpy(rng.normal(size=(rng.integers(0, 6), 2))).half(),
        "right": bool(rng.integers(2)),
    }


def _there_and_back(case, padded: bool) -> None:
    shuffler = _agreed(
        QuickShuffler(exchange=case.exchange, equal_rows=case.equal_rows, partitioner=case.partitioner),
        case.labels,
    )
    batch, loaded = _loaded(shuffler, case)
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(loaded, plan)
    check_identical(shuffler.unshuffle(moved, plan), loaded)
    here = _outputs(_sample_ids(moved), moved.batch_size - moved.num_samples if padded else 0, junk=True)
    expected = _outputs(_sample_ids(loaded), loaded.batch_size - loaded.num_samples)
    check_identical(shuffler.unshuffle(here, plan), expected)
    for name in ("scores", "keyed", "tokens", "right"):
        check_identical(shuffler.unshuffle(here[name], plan), expected[name], name)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_was_computed_comes_back_to_the_rows_that_were_loaded(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=15, deadline=None)
    @given(case=cases(num_ranks), padded=st.booleans())
    def returned(case, padded):
        pool.run(_there_and_back, case, padded)

    returned()


def _after_the_last_batch() -> None:
    shuffler = _agreed(QuickShuffler(verify=True))
    plan = shuffler.plan(None)
    assert not plan.has_batch
    padding = shuffler.padding_batch()
    moved = shuffler.exchange(padding, plan)
    check_identical(moved, padding)
    check_identical(shuffler.unshuffle(moved, plan), padding)
    check_identical(shuffler.unshuffle(torch.ones(1, 2), plan), torch.zeros(1, 2))


def test_padding_goes_there_and_back_once_all_loaders_have_ended(pools):
    pools(2).run(_after_the_last_batch)


def _other_outputs_back() -> None:
    shuffler = _agreed(QuickShuffler())
    batch = _lopsided()
    plan = shuffler.plan(batch)
    assert plan.moves
    ids = shuffler.exchange(batch, plan).matrix[:, 0, 0]
    learnt = (ids * torch.ones((), dtype=ids.dtype, requires_grad=True))[:, None]
    assert shuffler.unshuffle(learnt, plan)[:, 0].tolist() == _sample_ids(batch)
    assert shuffler.unshuffle(learnt.cfloat(), plan)[:, 0].real.tolist() == _sample_ids(batch)
    transposed = torch.stack([ids, -ids]).T
    assert shuffler.unshuffle(transposed, plan)[:, 1].tolist() == [-s for s in _sample_ids(batch)]


def test_complex_transposed_and_differentiated_outputs_come_back(pools):
    pools(2).run(_other_outputs_back)


def _rows_without_bytes() -> tuple[int, ...]:
    shuffler = _agreed(QuickShuffler())
    batch = _lopsided()
    plan = shuffler.plan(batch)
    assert plan.moves
    return tuple(shuffler.unshuffle(torch.zeros(int(plan.rows[dist.get_rank()]), 0), plan).shape)


def test_rows_without_bytes_come_back(pools):
    assert pools(2).run(_rows_without_bytes) == [(4, 0)] * 2


# Windows


@dataclass(frozen=True)
class WindowCase:
    """For each rank the rows and real rows of the batches that it has left."""

    seed: int
    window: int
    equal_rows: bool
    exchange: str
    max_step_ratio: float | None
    agreed_before: bool
    batches: tuple[tuple[tuple[int, int], ...], ...]


@st.composite
def window_cases(draw, num_ranks: int):
    window = draw(st.sampled_from([2, 4]))
    kind = draw(st.sampled_from(["complete", "incomplete batches", "incomplete windows"]))
    batch_size = draw(st.integers(1, 5))
    counts = [window] * num_ranks
    if kind == "incomplete windows":
        counts = [draw(st.integers(0, window)) for _ in range(num_ranks)]
    return WindowCase(
        seed=draw(st.integers(0, 10**6)),
        window=window,
        equal_rows=draw(st.booleans()),
        exchange=draw(st.sampled_from(BOTH)),
        max_step_ratio=draw(st.sampled_from([None, 1.0, 1.5])),
        agreed_before=draw(st.booleans()),
        batches=tuple(
            tuple(
                (batch_size, batch_size if kind == "complete" else draw(st.integers(0, batch_size)))
                for _ in range(count)
            )
            for count in counts
        ),
    )


def _window(case):
    """On one rank: what it loaded, what it got in each step with its rows, and the window."""
    shuffler = QuickShuffler(
        equal_rows=case.equal_rows,
        exchange=case.exchange,
        window=case.window,
        window_max_step_ratio=case.max_step_ratio,
        verify=True,
    )
    if case.agreed_before:
        _agreed(shuffler)
    rank = dist.get_rank()
    rng = np.random.default_rng((case.seed, rank))
    batches = [
        draw_batch(rng, 1000 * (rank + 1) + 100 * step, *sizes)
        for step, sizes in enumerate(case.batches[rank])
    ]
    window = shuffler.plan_window(batches)
    moved = []
    for step, plan in enumerate(window.steps):
        brought = shuffler.rows_for_step(batches, window, step)
        assert brought.num_samples == plan.num_loaded[rank]
        moved.append(shuffler.exchange(brought, plan))
        back = shuffler.unshuffle(moved[-1], plan)
        check_identical(sample_contents(back), sample_contents(brought))
    returned, outputs = [], []
    if window.steps:
        returned = shuffler.unshuffle(moved, window)
        outputs = shuffler.unshuffle([_outputs(_sample_ids(batch), 0) for batch in moved], window)
    for back, output, batch in zip(returned, outputs, batches, strict=True):
        check_identical(back, batch)
        check_identical(output, _outputs(_sample_ids(batch), batch.batch_size - batch.num_samples))
    return (
        [content for batch in batches for content in sample_contents(batch)],
        [sample_contents(batch) for batch in moved],
        [(batch.batch_size, batch.num_samples) for batch in moved],
        window,
    )


def _check_window(case, results) -> None:
    windows = [window for *_, window in results]
    for window in windows:
        assert window.steps == windows[0].steps
        for name in ("batch_sizes", "num_loaded", "workloads", "tokens"):
            assert np.array_equal(getattr(window, name), getattr(windows[0], name)), name
        for samples, of_rank_0 in zip(window.samples, windows[0].samples, strict=True):
            assert np.array_equal(samples, of_rank_0)
    num_steps = max(map(len, case.batches))
    assert len(windows[0].steps) == num_steps
    before = Counter(content for loaded, *_ in results for content in loaded)
    after = Counter(content for _, steps, *_ in results for step in steps for content in step)
    assert before == after
    assert sum(before.values()) == sum(real for of_rank in case.batches for _, real in of_rank)
    sizes = [size for _, _, of_rank, _ in results for size in of_rank]
    if case.equal_rows and num_steps:
        total = sum(rows for of_rank in case.batches for rows, _ in of_rank)
        assert {rows for rows, _ in sizes} == {max(-(-total // (num_steps * len(results))), 1)}
        assert max(real for _, real in sizes) - min(real for _, real in sizes) <= 1
    elif num_steps:
        assert all(rows == max(real, 1) for rows, real in sizes)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_window_neither_loses_nor_doubles_a_sample(pools, num_ranks):
    pool = pools(num_ranks)

    @settings(max_examples=20, deadline=None)
    @given(case=window_cases(num_ranks))
    def conserved(case):
        _check_window(case, pool.run(_window, case))

    conserved()


def _rows_of_a_window_of_padding() -> list[tuple[int, int]]:
    shuffler = QuickShuffler(window=2)
    batches = [draw_batch(np.random.default_rng(0), 0, 3, 0)] * 2
    window = shuffler.plan_window(batches)
    moved = [
        shuffler.exchange(shuffler.rows_for_step(batches, window, step), plan)
        for step, plan in enumerate(window.steps)
    ]
    assert [batch.batch_size for batch in moved] == [plan.rows[dist.get_rank()] for plan in window.steps]
    check_identical(dict(enumerate(shuffler.unshuffle(moved, window))), dict(enumerate(batches)))
    return [(batch.batch_size, batch.num_samples) for batch in moved]


def test_a_window_of_padding_only_has_as_many_rows_as_were_loaded(pools):
    assert pools(2).run(_rows_of_a_window_of_padding) == [[(3, 0), (3, 0)]] * 2


def _values_of_a_window_without_batches() -> list:
    shuffler = QuickShuffler(window=2)
    window = shuffler.plan_window([])
    assert window.steps == ()
    return shuffler.unshuffle([], window)


def test_of_a_window_that_no_rank_has_batches_for_nothing_comes_back(pools):
    assert pools(2).run(_values_of_a_window_without_batches) == [[], []]


def _window_of_lognormal_lengths(max_step_ratio: float | None) -> np.ndarray:
    shuffler = FieldShuffler(window=4, window_max_step_ratio=max_step_ratio)
    rng = np.random.default_rng(dist.get_rank())
    batches = [_history_batch(rng, 32) for _ in range(4)]
    window = shuffler.plan_window(batches)
    return step_ratios(window.workloads, [[samples] for samples in window.samples])


def test_no_step_of_a_window_is_larger_than_it_may_be(pools):
    free, limited = (pools(2).run(_window_of_lognormal_lengths, ratio)[0] for ratio in (None, 1.25))
    assert limited.max() <= 1.25 < free.max()


# What it costs


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
    shuffler = _agreed(QuickShuffler(exchange=exchange, partitioner="rebalance"))
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
    shuffler = _agreed(QuickShuffler())
    batch = _lopsided()
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


@dataclass(eq=False)
class HistoryBatch(HSTUBatch):
    workload: torch.Tensor | None = None


def _history_batch(rng: np.random.Generator, rows: int) -> HistoryBatch:
    """Items, actions and a label of each item, of lognormal histories, as HSTU is trained with."""
    lengths = torch.from_numpy(rng.lognormal(5, 1.2, rows).clip(1, 4096).astype(np.int64))
    total = int(lengths.sum())
    ids = torch.from_numpy(rng.integers(0, 10**6, 2 * total + rows))
    batch = HistoryBatch(
        features=KeyedJaggedTensor(
            ["user", "item", "action"],
            ids,
            lengths=torch.cat([torch.ones(rows, dtype=torch.int64), lengths, lengths]),
        ),
        batch_size=rows,
        feature_to_max_seqlen={"user": 1, "item": 4096, "action": 4096},
        contextual_feature_names=["user"],
        labels=KeyedJaggedTensor(["label"], torch.from_numpy(rng.integers(0, 2, total)), lengths=lengths),
        action_feature_name="action",
    )
    batch.workload = FLOPS.per_sample(batch.num_tokens())
    return batch


def _lopsided():
    """Four drawn samples, of which those of rank 0 are heavier."""
    rank = dist.get_rank()
    batch = draw_batch(np.random.default_rng(rank), 1000 * (rank + 1), 4, 4)
    batch.workload = torch.arange(4) + 100 * (rank == 0)
    return batch


def _bytes_of_steps(exchange: str) -> list[tuple[int, int, int, int]]:
    """Per step: bytes that the collective's tensors send and receive, and what `traffic` says of both."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shuffler = QuickShuffler(partitioner="rebalance", exchange=exchange)
    rng = np.random.default_rng(rank)
    steps = []
    for _ in range(4):
        batch = _history_batch(rng, 32)
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
        each = np.full(ranks, rows)
        loaded = LoadedSamples(workloads, tokens, size, each, each)
        placed = Placement("rebalance", None, True, None, None).place(loaded)
        plan = ShufflePlan(each, each, workloads, tokens, lengths, elements, size, tuple(placed), each)
        sent += [EXCHANGES["all_to_all"].traffic(plan, rank).sent for rank in range(ranks)]
        received += [EXCHANGES["all_gather"].traffic(plan, rank).received for rank in range(ranks)]
    assert 0 < np.mean(sent) <= np.mean(received) / 100


# What it refuses


def _errors_of_exchange() -> list[str]:
    shuffler = _agreed(QuickShuffler())
    rng = np.random.default_rng(dist.get_rank())
    batch = draw_batch(rng, 0, 4, 3)
    plan = shuffler.plan(batch)
    other_dtype = dataclasses.replace(batch, small=batch.small.float())
    errors = []
    for other in (draw_batch(rng, 0, 5, 3), shuffler.padding_batch(), other_dtype):
        with pytest.raises(ValueError) as error:
            shuffler.exchange(other, plan)
        errors.append(str(error.value))
    full = draw_batch(rng, 0, 4, 4)
    plan = shuffler.plan(full)
    other_lengths = draw_batch(rng, 0, 4, 4)
    with pytest.raises(ValueError) as error:
        shuffler.exchange(other_lengths, plan)
    return [*errors, str(error.value)]


def test_exchange_refuses_rows_and_fields_that_were_not_planned(pools):
    for rows, ended, dtype, lengths in pools(2).run(_errors_of_exchange):
        for error in (rows, ended, dtype, lengths):
            assert "give exchange the batch that plan was made for" in error
        assert "got a batch of 5 rows" in rows and "the plan is for 4 rows" in rows
        assert "got a batch of 1 rows" in ended


def _errors_of_the_way_back() -> list[str]:
    shuffler = QuickShuffler(window=2)
    batches = [draw_batch(np.random.default_rng(step), 0, 4, 3) for step in range(2)]
    window = shuffler.plan_window(batches)
    plan = window.steps[0]
    real = int(plan.num_placed[dist.get_rank()])
    wrong = [
        (torch.zeros(5), plan),
        (torch.zeros(real - 1), plan),
        (JaggedTensor(torch.zeros(0), lengths=torch.zeros(7).int()), plan),
        ({"rows": torch.zeros(4), "samples": torch.zeros(real)}, plan),
        (torch.zeros(()), plan),
        ([torch.zeros(4)], window),
        ([torch.zeros(4)] * 3, window),
    ]
    errors = []
    for values, of in wrong:
        with pytest.raises(ValueError) as error:
            shuffler.unshuffle(values, of)
        errors.append(str(error.value))
    return errors


def test_unshuffle_refuses_another_number_of_rows_or_steps(pools):
    for more, less, jagged, different, no_rows, one_step, three_steps in pools(2).run(
        _errors_of_the_way_back
    ):
        assert more == (
            "unshuffle got 5 rows in 'values', expected 4, as the exchange gave this rank, or 3 without the "
            "padding"
        )
        assert "got 2 rows" in less and "got 7 rows" in jagged
        assert "got 3 rows in 'samples'" in different
        assert "0-d" in no_rows
        assert "got values of 1 steps, the window has 2" in one_step
        assert "got values of 3 steps, the window has 2" in three_steps


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"window": 0}, "window=0: expected at least 1"),
        ({"window": -2}, "window=-2: expected at least 1"),
        ({"window_max_step_ratio": 1.5}, "window_max_step_ratio=1.5 has no effect with window=1"),
        ({"window": 2, "window_max_step_ratio": 0.9}, "window_max_step_ratio=0.9: expected at least 1"),
        ({"window": 2, "window_max_step_ratio": float("nan")}, "window_max_step_ratio=nan: expected"),
        ({"window": 2, "tolerance": 0.1}, "tolerance=0.1 has no effect with window=2"),
        ({"window": 2, "max_tokens": 9}, "max_tokens=9 has no effect with window=2"),
        ({"window": 2, "equal_rows": False, "max_rows": 9}, "max_rows=9 has no effect with window=2"),
        ({"window": 2, "partitioner": "rebalance"}, "partitioner='rebalance' has no effect with window=2"),
    ],
)
def test_settings_of_a_window_that_have_no_effect_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        FieldShuffler(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"exchange": "ring"}, r"unknown exchange 'ring'; there are \['all_gather', 'all_to_all'\]"),
        ({"planning_backend": "nccl"}, r"unknown planning backend 'nccl'; there are \('device', 'gloo'\)"),
    ],
)
def test_unknown_names_are_refused(setting, message):
    with pytest.raises(KeyError, match=message):
        FieldShuffler(**setting)


def test_a_rank_alone_keeps_its_rows_whatever_the_window():
    shuffler = FieldShuffler(window=4, verify=True)
    batches = [draw_batch(np.random.default_rng(number), 10 * number, 4, 3) for number in range(3)]
    window = shuffler.plan_window(batches)
    steps = [shuffler.rows_for_step(batches, window, step) for step in range(len(window.steps))]
    exchanged = [shuffler.exchange(batch, plan) for batch, plan in zip(steps, window.steps, strict=True)]
    assert exchanged == batches
    assert shuffler.unshuffle(exchanged, window) == batches


def _plans_of_both_backends(case) -> None:
    plans = []
    for backend in ("gloo", "device"):
        shuffler = _agreed(
            QuickShuffler(
                planning_backend=backend,
                partitioner=case.partitioner,
                equal_rows=case.equal_rows,
                verify=True,
            ),
            case.labels,
        )
        plans.append(shuffler.plan(_loaded(shuffler, case)[0]))
    assert plans[0] == plans[1]
    assert plans[0].fingerprint == plans[1].fingerprint


def test_the_planning_backend_does_not_change_the_plan(pools):
    pool = pools(3)

    @settings(max_examples=10, deadline=None)
    @given(case=cases(3))
    def same(case):
        pool.run(_plans_of_both_backends, case)

    same()
