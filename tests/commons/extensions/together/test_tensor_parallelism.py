"""Balancing beside tensor parallelism: two groups of two ranks, each with half of a layer's heads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commons.distributed import PARTITIONERS, BatchShuffler, ShufflerSettings
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.padded import Padded
from commons.extensions.pieces import Pieces
from commons.extensions.verification import Verification
from commons.partition import imbalance, refined
from commons.pipeline.train_pipelines import SequentialTrainPipeline
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.internals import RowTable, place_rows
from tests.commons.extensions.pieces.cut_samples import AheadBatch, ahead_batch
from tests.commons.histories import TokenShuffler
from tests.commons.partition.heavy_tails import ROWS, draw_flops
from tests.docs.pages import PAGES, blocks
from tests.on_ranks import on_ranks

RANKS, TOGETHER, WIDTH, STEPS = 4, 2, 6, 3
GROUPS = ((0, 1), (2, 3))
CPU = torch.device("cpu")


class _Shuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch["length"] ** 2

    def get_tokens(self, batch):
        return batch["length"]

    def get_loss_tokens(self, batch):
        return batch["count"]


def _group(groups: Sequence[Sequence[int]]) -> Any:
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(of for of, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def _groups() -> tuple[Any, Any]:
    """Returns this rank's tensor-parallel and data-parallel groups."""
    return _group(GROUPS), _group([[ranks[place] for ranks in GROUPS] for place in range(TOGETHER)])


def _batch(step: int, loader: int) -> dict[str, torch.Tensor]:
    """Returns the batch of a step of one of several loaders, which load different numbers of rows."""
    rng = np.random.default_rng((step, loader))
    rows = 6 + 2 * loader
    return {
        "x": torch.from_numpy(rng.standard_normal((rows, WIDTH))).float(),
        "y": torch.from_numpy(rng.standard_normal(rows)).float(),
        "count": torch.from_numpy(rng.integers(1, 4, rows)),
        "length": torch.from_numpy(rng.integers(1, 100, rows)),
    }


def _loader(kind: str) -> int:
    return dist.get_rank() // TOGETHER if kind == "same" else dist.get_rank()


class _Sum(torch.autograd.Function):
    """Sums over the ranks of a group in the forward, and passes gradients through."""

    @staticmethod
    def forward(context, value, group):
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class _ToTensorParallel(torch.autograd.Function):
    """Gathers the rows of a group's ranks, or passes on the same rows, before a layer that they divide.

    The backward adds up the parts of all ranks. Rows of a rank get their gradient once per rank of the group,
    as a mean over all ranks needs it.
    """

    @staticmethod
    def forward(context, rows, group, gathers):
        context.group, context.gathers, context.num_rows = group, gathers, len(rows)
        if not gathers:
            return rows.view_as(rows)
        parts: list[Any] = [None] * TOGETHER
        dist.all_gather_object(parts, rows, group=group)
        context.before = sum(map(len, parts[: dist.get_rank(group)]))
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        if context.gathers:
            gradient = gradient[context.before :][: context.num_rows] * TOGETHER
        return gradient, None, None


class _Split(torch.nn.Module):
    """A table in front of two layers, of whose hidden units each rank of a group has its part."""

    def __init__(
        self, tensor: Any, data: Any, gathers: bool, reduction: str, num_parts: int = TOGETHER
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = torch.randn(8, WIDTH), torch.randn(8)
        part = 0 if num_parts == 1 else dist.get_rank(tensor)
        self.first = torch.nn.Parameter(first.chunk(num_parts)[part].clone())
        self.second = torch.nn.Parameter(second.chunk(num_parts)[part].clone())
        self._tensor, self._data, self._gathers, self._reduction = tensor, data, gathers, reduction
        self._num_parts = num_parts
        self.table = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)  # on all ranks, before the gather

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, count = batch["x"] * self.table, batch["y"], batch["count"]
        if self._num_parts > 1:
            x = _ToTensorParallel.apply(x, self._tensor, self._gathers)
        if self._gathers:
            parts: list[Any] = [None] * TOGETHER
            dist.all_gather_object(parts, (y, count), group=self._tensor)
            y, count = map(torch.cat, zip(*parts, strict=True))
        output = torch.relu(x @ self.first.T) @ self.second
        if self._num_parts > 1:
            output = _Sum.apply(output, self._tensor)
        losses = (output - y) ** 2 * count
        if self._reduction == "sum":
            return losses, output
        tokens = count.sum().float()
        if self._reduction == "global_mean":
            dist.all_reduce(tokens, group=self._data)
            tokens /= dist.get_world_size(self._data)
        return losses.sum() / tokens, output


def _expected(kind: str, step: int, num_loaders: int = RANKS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the mean over all loss tokens in one process, and its gradient in this rank's parts."""
    loaders = range(len(GROUPS)) if kind == "same" else range(num_loaders)
    batches = [_batch(step, loader) for loader in loaders]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    model = _Split(None, None, False, "mean", num_parts=1)
    loss, _ = model(whole)
    loss.backward()
    part = dist.get_rank() % TOGETHER
    divided = [parameter.grad.chunk(TOGETHER)[part] for parameter in (model.first, model.second)]
    return loss.detach(), [*divided, model.table.grad]


def _shuffler(kind: str, tensor: Any, data: Any, **settings: Any) -> BatchShuffler:
    settings = {"equal_rows": False, "token_tolerance": None} | settings
    return _Shuffler(data if kind == "same" else None, computes_with=tensor, **settings)


def _check(model: _Split, tensor: Any, expected: Sequence[torch.Tensor]) -> None:
    """Checks gradients that were reduced over the data-parallel group; the table's is that of all ranks."""
    dist.all_reduce(model.table.grad, group=tensor)
    model.table.grad /= TOGETHER
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean", "global_mean"])
@pytest.mark.parametrize("kind", ["same", "own"])
@pytest.mark.parametrize("enabled", [True, False])
@on_ranks(RANKS)
def test_a_pipeline_has_the_gradient_of_one_process(kind, reduction, enabled):
    tensor, data = _groups()
    model = _Split(tensor, data, kind == "own", reduction)
    replicated = DistributedDataParallel(model, process_group=data)
    optimizer = torch.optim.SGD(replicated.parameters(), 0.0)
    shuffler = _shuffler(kind, tensor, data, enabled=enabled)
    pipeline = SequentialTrainPipeline(replicated, optimizer, CPU, shuffler, reduction)
    batches = iter([_batch(step, _loader(kind)) for step in range(STEPS)])
    for step in range(STEPS):
        pipeline.progress(batches)
        mean, gradients = _expected(kind, step)
        _check(model, tensor, gradients)
        assert pipeline.plan.moves == enabled
        loss = pipeline.loss_sum
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / pipeline.loss_tokens, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "global_mean"])
@pytest.mark.parametrize("kind", ["same", "own"])
@on_ranks(RANKS)
def test_a_loop_has_the_gradient_of_one_process(kind, reduction, gradients):
    tensor, data = _groups()
    model = _Split(tensor, data, kind == "own", reduction)
    shuffler = _shuffler(kind, tensor, data)
    # The loaders of the last group end a step earlier, unless ranks of each group load the same batches.
    last = STEPS - (kind == "own" and dist.get_rank() in GROUPS[-1])
    steps = [*shuffler.plan_ahead(_batch(step, _loader(kind)) for step in range(last))]
    assert len(steps) == STEPS
    for step, (batch, plan) in enumerate(steps):
        model.zero_grad()
        loss, _ = model(shuffler.exchange(batch, plan))
        shuffler.scale(loss, plan, reduction, gradients).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)
            if gradients == "mean":
                parameter.grad /= dist.get_world_size(data)
        _check(model, tensor, _expected(kind, step, RANKS if step < STEPS - 1 else TOGETHER)[1])


def _first_error(group: Any, tensor: Any, kind: str, **settings: Any) -> str:
    shuffler = _Shuffler(group, computes_with=tensor, equal_rows=False, **settings)
    return error_of(shuffler.plan, _batch(0, _loader(kind)))


@on_ranks(RANKS)
def test_groups_that_do_not_fit_the_batches_are_refused_on_all_ranks():
    (tensor, data), rank = _groups(), dist.get_rank()
    error = _first_error(None, tensor, "same")
    assert error.startswith(
        "ValueError: ranks 0 and 1 compute together and load the same batch: balance among the data"
    )
    error = _first_error(data, tensor, "own")
    assert "compute together and load different batches: load the same ones or, if the model gathers" in error
    assert error.startswith("ValueError: ranks 0 and 1")
    for extension in (MicroBatches(1000), Padded(), LearnedCosts()):
        error = _first_error(None, tensor, "own", extensions=[extension])
        assert f"balance among all these ranks, without {extension.name}" in error
    cutting = TokenShuffler(computes_with=tensor, extensions=[Pieces()], equal_rows=False)
    assert "balance among all these ranks, without pieces" in error_of(cutting.plan, _histories(0, rank))
    error = error_of(_Shuffler, None, computes_with=tensor if rank else None)
    assert "at the same time one" in error


@on_ranks(RANKS)
def test_a_copy_of_a_row_that_ranks_would_count_together_is_refused():
    tensor, data = _groups()
    shuffler = _shuffler("own", tensor, data)
    batch = {name: of[:1] for name, of in _batch(0, dist.get_rank()).items()}
    plan = shuffler.plan(batch)
    assert shuffler.scale(torch.zeros(()), plan, "sum") == 0
    plan = shuffler.plan(batch if dist.get_rank() else None)
    loss = torch.zeros(())
    shuffler.exchange(batch if dist.get_rank() else shuffler.padding_batch(), plan)
    assert "which ranks that compute together would count" in error_of(shuffler.scale, loss, plan, "sum")


EXTENSIONS = {
    "none": list,
    "micro-batches": lambda: [MicroBatches(400)],
    "padded": lambda: [Padded()],
    "learned costs": lambda: [LearnedCosts()],
}


@pytest.mark.parametrize("name", EXTENSIONS)
@on_ranks(RANKS)
def test_ranks_that_load_the_same_batches_compute_the_same_samples(name):
    tensor, data = _groups()
    shuffler = _shuffler("same", tensor, data, extensions=EXTENSIONS[name]())
    rng, moved, learned = np.random.default_rng(dist.get_rank()), 0, False
    for step in range(80 if name == "learned costs" else 4):
        batch = _batch(step, _loader("same"))
        plan = shuffler.plan(batch)
        exchanged = shuffler.exchange(batch, plan)
        shuffler.scale(torch.zeros(()), plan, None)
        if name == "learned costs":  # with noise that differs between the ranks of a group
            seconds = 1e-6 * plan.loads[shuffler.group.rank] * rng.lognormal(0, 0.3)
            shuffler.extensions[0].record(plan, float(seconds))
            learned |= plan.predicted_seconds is not None
        of_group: list[Any] = [None] * TOGETHER
        dist.all_gather_object(of_group, [exchanged[key].tolist() for key in exchanged], group=tensor)
        assert of_group[0] == of_group[1]
        moved += plan.moves
    assert moved and learned == (name == "learned costs")


def _histories(step: int, loader: int) -> AheadBatch:
    rng = np.random.default_rng((step, loader))
    return ahead_batch(rng, np.append(rng.integers(1, 9, 4), 9 if loader else 90), 0)


@on_ranks(RANKS)
def test_pieces_are_the_same_on_ranks_that_load_the_same_batches():
    tensor, data = _groups()
    settings = {"extensions": [Pieces(), Verification()], "equal_rows": False}
    shuffler = TokenShuffler(data, computes_with=tensor, **settings)
    for step in range(3):
        batch = _histories(step, _loader("same"))
        plan = shuffler.plan(batch)
        exchanged = shuffler.exchange(batch, plan)
        of_group: list[Any] = [None] * TOGETHER
        ids = exchanged.features.values().tolist()
        dist.all_gather_object(of_group, ids, group=tensor)
        assert of_group[0] == of_group[1] and not plan.rows.starts_sample.all()


@on_ranks(RANKS)
def test_ranks_that_load_other_batches_later_are_found_by_verification():
    tensor, data = _groups()
    shuffler = _shuffler("same", tensor, data, extensions=[Verification()])
    shuffler.plan(_batch(0, _loader("same")))
    assert "on rank 1 of the ranks that compute together" in error_of(
        shuffler.plan, _batch(1, dist.get_rank())
    )


@on_ranks(RANKS)
def test_a_state_that_only_some_ranks_restore_is_refused():
    tensor, data = _groups()
    saved = {}
    for restores in (True, dist.get_rank() == 0):
        shuffler = _shuffler("same", tensor, data, extensions=[LearnedCosts()])
        (learned,) = shuffler.extensions
        if saved and restores:
            learned.load_state(saved)
        if saved:
            error = error_of(shuffler.plan, _batch(3, _loader("same")))
        else:
            plans = [shuffler.plan(_batch(step, _loader("same"))) for step in range(3)]
            saved = learned.state(plans[-1])
    assert "have restored different states" in error


def _partitioner_of_the_page(ranks_per_group: int) -> Any:
    (code,) = (block.code for block in blocks("python") if "TENSOR_PARALLEL =" in block.code)
    names: dict[str, Any] = {}
    before = dict(PARTITIONERS)
    exec(code.replace("workload_balancer", "commons"), names)
    PARTITIONERS.clear()
    PARTITIONERS.update(before)
    names["TENSOR_PARALLEL"] = ranks_per_group
    return names["rebalance_groups_of_ranks"]


@on_ranks(RANKS)
def test_the_partitioner_of_the_page_trains_as_one_process():
    tensor, data = _groups()
    PARTITIONERS["groups_of_ranks"] = _partitioner_of_the_page(TOGETHER)
    try:
        shuffler = _shuffler("own", tensor, data, partitioner="groups_of_ranks")
        model = _Split(tensor, data, True, "mean")
        for step in range(STEPS):
            batch = _batch(step, dist.get_rank())
            plan = shuffler.plan(batch)
            model.zero_grad()
            loss, _ = model(shuffler.exchange(batch, plan))
            shuffler.scale(loss, plan, "mean", "sum").backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=data)
            _check(model, tensor, _expected("own", step)[1])
    finally:
        del PARTITIONERS["groups_of_ranks"]


def test_the_page_has_the_imbalance_over_groups(monkeypatch):
    tensor, data = 4, 8
    home = np.repeat(np.arange(tensor * data), ROWS)
    monkeypatch.setitem(PARTITIONERS, "groups_of_ranks", _partitioner_of_the_page(tensor))
    settings = ShufflerSettings("groups_of_ranks", equal_rows=False)
    loaded_rows, rng, found = np.full(tensor * data, ROWS), np.random.default_rng(0), []
    for _ in range(30):
        costs = draw_flops("lognormal", rng, len(home))
        for_each_place = np.empty_like(home)
        for place in range(tensor):
            mine = np.flatnonzero(home % tensor == place)
            for group, part in enumerate(refined(costs[mine], data)):
                for_each_place[mine[part]] = group
        ones = np.ones_like(costs)
        rows = RowTable(loaded_rows, loaded_rows, costs, ones, ones, ones[:, None], ones)
        over_groups = place_rows(rows, settings) // tensor
        found.append(
            [
                imbalance(costs, [np.flatnonzero(group_of == group) for group in range(data)])
                for group_of in (over_groups, for_each_place, home // tensor)
            ]
        )
    over_groups, planned, loaded = (f"{mean:.2f}" for mean in np.mean(found, 0))
    page = " ".join(PAGES["docs/parallelism.md"].split())
    assert f"is {over_groups}. A plan for each data-parallel group" in page
    assert f"leaves {planned}, and no balancing leaves {loaded}." in page
