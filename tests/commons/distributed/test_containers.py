"""Batches that are no `BaseBatch`: dicts, TorchRec's `Batch`, TensorDicts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.distributed.exchange import EXCHANGES
from commons.sequence_batch.sample_rows import SampleRows
from tests.commons.distributed.loaded_batches import check_identical
from tests.commons.distributed.test_shuffle import QuickShuffler

VOCABULARY = torch.arange(10)  # shared


def _as_nested(lengths: np.ndarray, values: torch.Tensor) -> torch.Tensor:
    offsets = torch.from_numpy(np.append(0, np.cumsum(lengths)))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def make_batch(kind: str, seed: int, first_sample: int, rows: int):
    """Every value of a sample is its number, and a sample's lengths are drawn from it."""
    samples = np.arange(first_sample, first_sample + rows)
    drawn = [np.random.default_rng((seed, sample)).integers(0, 5, 4) for sample in samples]
    lengths = np.stack(drawn, 1) if rows else np.zeros((4, 0), dtype=np.int64)
    values = [torch.from_numpy(samples.repeat(of_key)) for of_key in lengths]
    keyed = KeyedJaggedTensor(
        ["a", "b"],
        torch.cat(values[:2]),
        weights=torch.cat(values[:2]).float() / 3,
        lengths=torch.from_numpy(lengths[:2].ravel()),
        stride=rows,
    )
    ids = torch.from_numpy(samples)
    dense = torch.stack([ids, -ids], 1).double()
    if kind == "torchrec":
        return TorchRecBatch(dense_features=dense, sparse_features=keyed, labels=ids.float())
    if kind == "tensordict":
        return TensorDict(
            {
                "ids": ids,
                "dense": dense,
                "history": _as_nested(lengths[2], values[2]),
                "user": {"age": ids.int(), "home": {"place": dense.half()}},
            },
            batch_size=[rows],
        )
    return {
        "ids": ids,
        "keyed": keyed,
        "jagged": JaggedTensor(values[2].int(), lengths=torch.from_numpy(lengths[2]).int()),
        "nested": _as_nested(lengths[3], values[3]),
        "dense": dense,
        "name": "train",
        "rate": 0.5,
        "limits": [1, 2],
        "nothing": None,
    }


def contents(batch) -> list[tuple]:
    """For each row, everything that belongs to it, comparable."""
    if isinstance(batch, TorchRecBatch):
        fields = {"dense": batch.dense_features, "keyed": batch.sparse_features, "labels": batch.labels}
    elif isinstance(batch, TensorDict):
        fields = dict(batch.items(include_nested=True, leaves_only=True))
    else:
        fields = batch
    columns = []
    for name, value in fields.items():
        if isinstance(value, KeyedJaggedTensor):
            columns += [(name, _rows_of(value[key])) for key in value.keys()]  # noqa: SIM118
        elif isinstance(value, JaggedTensor):
            columns.append((name, _rows_of(value)))
        elif isinstance(value, torch.Tensor):
            rows = value.unbind() if value.is_nested else value
            columns.append((name, [tuple(row.flatten().tolist()) for row in rows]))
    return [
        tuple((name, row) for (name, _), row in zip(columns, of_sample, strict=True))
        for of_sample in zip(*(rows for _, rows in columns), strict=True)
    ]


def _rows_of(jagged: JaggedTensor) -> list[tuple]:
    parts = [jagged.values(), *([] if jagged.weights_or_none() is None else [jagged.weights()])]
    lengths = jagged.lengths().tolist()
    return list(zip(*([tuple(row.tolist()) for row in part.split(lengths)] for part in parts), strict=True))


class ContainerShuffler(QuickShuffler):
    """Long histories cost more. Remembers the batches that it was asked about."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.asked_about = []

    def get_workloads(self, batch):
        self.asked_about.append(batch)
        if isinstance(batch, TorchRecBatch):
            lengths = batch.sparse_features.lengths().view(2, -1).sum(0)
        elif isinstance(batch, TensorDict):
            lengths = batch["history"].offsets().diff()
        else:
            lengths = batch["jagged"].lengths()
        return lengths.long() ** 2


def check_shown(shown, batch) -> None:
    """`get_workloads` sees the host batch itself, or a copy in which lengths do not wrap."""
    if isinstance(batch, dict):
        assert shown["jagged"].lengths().dtype == torch.int64
        assert contents(shown) == contents(batch)
    else:
        assert shown is batch


def _move(kind: str, seed: int, rows: tuple[int, ...], exchange: str, equal_rows: bool):
    shuffler = ContainerShuffler(exchange=exchange, equal_rows=equal_rows, verify=True)
    rank = dist.get_rank()
    shuffler.shuffle(make_batch(kind, seed, 0, 2))
    batch = make_batch(kind, seed, 1000 * (rank + 1), rows[rank])
    plan = shuffler.plan(batch)
    check_shown(shuffler.asked_about[-1], batch)
    moved = shuffler.exchange(batch, plan)
    assert type(moved) is type(batch)
    if kind == "dict":
        assert list(moved) == list(batch)
        for shared in ("name", "rate", "limits", "nothing"):
            assert moved[shared] is batch[shared]
    elif kind == "tensordict":
        assert moved.batch_size == (plan.rows[rank, 0],)
    back = shuffler.unshuffle(moved, plan)
    if kind == "torchrec":
        check_identical(vars(back), vars(batch))
    else:
        check_identical(back, batch)
    real = int(plan.num_placed[rank])
    return contents(batch), plan.partition[rank], contents(moved)[:real], len(contents(moved))


KINDS = ["dict", "torchrec", "tensordict"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_any_container_is_lost(pools, kind):
    pool = pools(3)

    @settings(max_examples=10, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        rows=st.one_of(
            st.integers(1, 5).map(lambda rows: (rows,) * 3),
            st.tuples(*[st.integers(1, 5)] * 3),
        ),
        exchange=st.sampled_from(sorted(EXCHANGES)),
        equal_rows=st.booleans(),
    )
    def conserved(seed, rows, exchange, equal_rows):
        results = pool.run(_move, kind, seed, rows, exchange, equal_rows)
        every = [content for loaded, *_ in results for content in loaded]
        assert len(every) == sum(rows)
        assert Counter(every) == Counter(content for _, _, got, _ in results for content in got)
        for _, samples, got, num_rows in results:
            assert got == [every[sample] for sample in samples]
            assert num_rows == max(len(samples), 1)
            assert not equal_rows or len(samples) in (sum(rows) // 3, -(-sum(rows) // 3))

    conserved()


def _with_an_ended_loader(kind: str):
    shuffler = ContainerShuffler(window=2)
    rank = dist.get_rank()
    batches = [make_batch(kind, 0, 10 * step, 4) for step in range(2)] if rank == 0 else []
    window = shuffler.plan_window(batches)
    moved = [
        shuffler.exchange(shuffler.rows_for_step(batches, window, step), plan)
        for step, plan in enumerate(window.steps)
    ]
    assert {type(batch) for batch in moved} == {type(shuffler.padding_batch())}
    back = shuffler.unshuffle_window(moved, window)
    assert [contents(batch) for batch in back] == [contents(batch) for batch in batches]
    got = [contents(batch)[: plan.num_placed[rank]] for batch, plan in zip(moved, window.steps, strict=True)]
    flat = [
        [content for batch in of_steps for content in batch] for of_steps in (map(contents, batches), got)
    ]
    return flat[0], flat[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_any_container_where_one_rank_has_no_batch(pools, kind):
    (loaded, got), (nothing, got_elsewhere) = pools(2).run(_with_an_ended_loader, kind)
    assert nothing == [] and len(got_elsewhere) == 4
    assert Counter(got + got_elsewhere) == Counter(loaded)


class EvenShuffler(QuickShuffler):
    """Every row costs the rank's number: those of rank 1 have to move."""

    def get_workloads(self, batch):
        value = next(value for value in batch.values() if isinstance(value, torch.Tensor))
        return torch.full((value.shape[0],), dist.get_rank() * 10)


def _shared_data_of_a_tensordict():
    batch = TensorDict({"ids": torch.arange(4), "name": "train"}, batch_size=[4])
    return EvenShuffler().shuffle(batch)["name"]


def test_what_is_no_tensor_in_a_tensordict_stays(pools):
    assert pools(2).run(_shared_data_of_a_tensordict) == ["train", "train"]


def _ids_under(keys: list) -> list[dict]:
    ids = torch.arange(4) + 4 * dist.get_rank()
    moved = EvenShuffler().shuffle({key: ids + 100 * number for number, key in enumerate(keys)})
    return [moved[key].tolist() for key in keys]


@pytest.mark.parametrize("keys", [["ids", 3], ["ids", ("user", "age")]])
def test_keys_of_a_dict_need_not_be_names(pools, keys):
    results = pools(2).run(_ids_under, keys)
    ids = [sample for result in results for sample in result[0]]
    assert sorted(ids) == list(range(8)) != ids
    assert [other for result in results for other in result[1]] == [sample + 100 for sample in ids]


def _ids_of_a_tensordict() -> list[list[int]]:
    ids = torch.arange(4) + 4 * dist.get_rank()
    batch = TensorDict({"user/age": ids, "user": {"age": ids + 100}}, batch_size=[4])
    moved = EvenShuffler().shuffle(batch)
    return [moved["user/age"].tolist(), moved["user", "age"].tolist()]


def test_keys_of_a_tensordict_may_look_like_paths(pools):
    results = pools(2).run(_ids_of_a_tensordict)
    ids = [sample for result in results for sample in result[0]]
    assert sorted(ids) == list(range(8))
    assert [other for result in results for other in result[1]] == [sample + 100 for sample in ids]


def _error_of(batch) -> str:
    try:
        EvenShuffler().plan(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "planned"


KEYED = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"name": "train"}, "TypeError: dict has no rows to place; expected a BaseBatch"),
        ({}, "TypeError: dict has no rows to place"),
        (TensorDict({}, batch_size=[3]), "TypeError: tensordict._td.TensorDict has no rows to place"),
        ([3], "TypeError: list has no rows to place"),
        (
            {"ids": torch.arange(3), "keyed": KEYED},
            "ValueError: fields have different numbers of rows: {'ids': 3, 'keyed': 2}",
        ),
        (
            {"ids": torch.arange(3), "loss": torch.tensor(1.0)},
            "ValueError: loss is a tensor without rows (0-d); give it one row per sample",
        ),
    ],
)
def test_containers_without_rows_are_the_same_error_on_all_ranks(pools, batch, expected):
    errors = pools(2).run(_error_of, batch)
    assert errors[0] == errors[1]
    assert errors[0].startswith(expected)


def test_a_container_of_a_rank_alone_is_left_as_it_is():
    class Alone(BatchShuffler):
        def get_workloads(self, batch):
            return batch["ids"]

    batch = make_batch("dict", 0, 0, 3)
    assert Alone().shuffle(batch) is batch


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.arange(4), r"more is a numpy\.ndarray"),
        ([np.arange(4)], r"more\[0\] is a numpy\.ndarray"),
        ({"a b": object()}, r"more\['a b'\] is a object"),
    ],
)
def test_data_that_would_stay_behind_is_refused(value, kind):
    with pytest.raises(TypeError, match=f"{kind}, which would stay behind when its samples move"):
        SampleRows().per_sample_fields({"ids": torch.arange(4), "more": value})


def test_a_value_per_row_of_a_tensordict_that_is_no_tensor_is_refused():
    rows = TensorDict({"name": NonTensorStack("a", "b"), "ids": torch.arange(2)}, batch_size=[2])
    with pytest.raises(
        TypeError, match=r"name is a .*NonTensorStack, .* has a value that is no tensor for each row"
    ):
        SampleRows().per_sample_fields(rows)


def test_a_nested_tensor_with_holes_is_refused():
    nested = torch.nested.nested_tensor_from_jagged(
        torch.arange(6), offsets=torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 1])
    )
    with pytest.raises(TypeError, match="without holes"):
        SampleRows().per_sample_fields({"nested": nested})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of this layout alone
def test_a_nested_tensor_of_another_layout_is_refused():
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)])
    with pytest.raises(TypeError, match=r"layout torch\.jagged"):
        SampleRows().per_sample_fields({"nested": nested})
