"""The page's request-level batches learn what one process learns with a row per candidate."""

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from commons.extensions.unshuffle import Unshuffle
from commons.sequence_batch import BaseBatch
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, steps_of
from tests.docs.pages import PAGES, blocks
from tests.docs.python_blocks import run_page
from tests.process_pool import RankError

PAGE = "docs/your-own-model.md"
USER = ["visited", "bought"]
KEYS = [*USER, "shown"]
NUM_IDS, DIM, RATE = 30, 8, 0.02
STEPS = ((6, 5), (3, 4), (1, 0))  # requests of each rank; those of rank 0 have the long histories
Request = dict[str, list[int]]


def _page() -> Any:
    """Runs the page's imports and its code of request-level batches, and returns the module."""
    of_page = [block for block in blocks("python") if block.page == PAGE]
    problem = run_page(None, [of_page[0], *(block for block in of_page if "class Requests" in block.code)])
    assert not problem, problem
    return sys.modules["docs_page"]


def _draw(step: int, rank: int) -> list[Request]:
    rng = np.random.default_rng((step, rank))
    drawn = []
    for number in range(STEPS[step][rank]):
        candidates = 1 + number % 4
        sizes = [*rng.integers(0, 40 if rank == 0 else 5, len(USER)), candidates]  # some histories are empty
        request = {key: rng.integers(NUM_IDS, size=n).tolist() for key, n in zip(KEYS, sizes, strict=True)}
        drawn.append({**request, "clicked": rng.integers(2, size=candidates).tolist()})
    return drawn


def _jagged(rows: Sequence[list[int]]) -> JaggedTensor:
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    return JaggedTensor(values, lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32))


def _keyed(rows: Sequence[Request], keys: Sequence[str]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict({key: _jagged([row[key] for row in rows]) for key in keys})


def _labels(rows: Sequence[Request]) -> JaggedTensor:
    jagged = _jagged([row["clicked"] for row in rows])
    return JaggedTensor(jagged.values().float(), lengths=jagged.lengths())


def _requests(page: Any, rows: Sequence[Request]) -> Any:
    return page.Requests(_keyed(rows, USER), _jagged([row["shown"] for row in rows]), _labels(rows))


def _one_row_per_candidate(rows: Sequence[Request]) -> Any:
    """Returns what the model reads, with the features of the user once per candidate."""
    repeated = [{**row, "shown": [item]} for row in rows for item in row["shown"]]
    return SimpleNamespace(features=_keyed(repeated, KEYS), clicked=_labels(rows))


def _waves(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return weight.copy_(torch.arange(weight.numel()).sin().view_as(weight))


def _model(page: Any) -> torch.nn.Module:
    model = page.CandidateModel()
    model.embeddings = EmbeddingBagCollection(
        [EmbeddingBagConfig(NUM_IDS, DIM, f"t_{key}", feature_names=[key], init_fn=_waves) for key in KEYS]
    )
    torch.manual_seed(0)
    model.head = torch.nn.Linear(len(KEYS) * DIM, 1)
    return model


def _sharded(model: torch.nn.Module, place: Callable[[int], Any]) -> torch.nn.Module:
    """Shards a model's tables, each as `place` says by its number."""
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": RATE})
    placed = {f"t_{key}": place(number) for number, key in enumerate(KEYS)}
    plan = construct_module_sharding_plan(model.embeddings, placed, device_type="cpu")
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"embeddings": plan}))


PLACES: dict[str, Callable[[int], Any]] = {
    "table": lambda number: table_wise(number % 2, compute_kernel="fused"),
    "row": lambda number: row_wise(compute_kernel="fused"),
    "replicated": lambda number: data_parallel(),
}
Parameters = dict[tuple[str, int], torch.Tensor]


def _trained(name: str) -> tuple[list[float], Parameters]:
    """Returns the mean loss of each step, and this rank's parameters. Collective."""
    page, rank = _page(), dist.get_rank()
    model = _sharded(_model(page), PLACES["table"])
    optimizer = torch.optim.SGD(model.module.head.parameters(), RATE)
    unshuffle = Unshuffle()
    pipeline = pipeline_of(name, model, optimizer, page.RequestShuffler(extensions=[unshuffle]), "sum")
    drawn, losses = [_draw(step, rank) for step in range(len(STEPS))], []
    steps = steps_of(pipeline, [_requests(page, rows) for rows in drawn if rows])
    for step, (rows, (loss_sum, tokens, scores)) in enumerate(zip(drawn, steps, strict=True)):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / tokens)
        assert tokens == sum(len(row["shown"]) for row in _of_all(step))
        at_home = unshuffle.unshuffle(scores, pipeline.plan)
        assert at_home.lengths().tolist() == [len(row["shown"]) for row in rows]
        if all(STEPS[step]):
            assert pipeline.report.samples_moved
            assert pipeline.report.imbalance_after < pipeline.report.imbalance_before
    return losses, shards_of(model)


def _of_all(step: int) -> list[Request]:
    return [row for rank in range(2) for row in _draw(step, rank)]


def _trained_alone() -> tuple[list[float], Parameters, Parameters]:
    """Returns the loss of each step, and the parameters before and after all of them."""
    model = _model(_page())
    start = shards_of(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(len(STEPS)):
        loss = model(_one_row_per_candidate(_of_all(step)))[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, start, shards_of(model)


@pytest.mark.parametrize("name", ["none", "native"])
def test_requests_learn_what_one_process_learns_with_a_row_per_candidate(pools, name):
    [(losses, start, parameters)] = pools(1).run(_trained_alone)
    for of_rank, shards in pools(2).run(_trained, name):
        assert of_rank == pytest.approx(losses, rel=1e-5)
        for key, got in shards.items():  # by tables, so each is whole
            change = parameters[key] - start[key]
            assert (got - parameters[key]).norm() <= 1e-5 * change.norm(), key


def _step_of_torchrec(kind: str, most_candidates: int) -> None:
    """Runs a step without the stage, in which each request of rank 1 has at most so many candidates."""
    page, rows = _page(), _draw(0, dist.get_rank())
    if dist.get_rank() == 1:
        rows = [row | {key: row[key][:most_candidates] for key in ("shown", "clicked")} for row in rows]
    model = _sharded(_model(page), PLACES[kind])  # which has to live until the backward
    losses, _ = model(_requests(page, rows))
    losses.sum().backward()


@pytest.mark.parametrize(
    ("kind", "most_candidates", "error"),
    [
        ("row", 1, "ProcessGroupGloo::allgather: invalid tensor size"),
        ("replicated", 1, "split_with_sizes expects split_sizes to sum exactly"),
        ("table", 0, "All input_rows must be the same"),
    ],
)
def test_what_does_not_work_fails_without_the_stage(pools, kind, most_candidates, error):
    assert f"`{error}`" in PAGES[PAGE]
    with pytest.raises(RankError, match=error):
        pools(2).run(_step_of_torchrec, kind, most_candidates)


def test_errors_name_the_section():
    named = f"{PAGE} shows \\(Request-level batches\\)"
    assert "\n### Request-level batches\n" in PAGES[PAGE]
    features = _requests(_page(), _draw(0, 0)).features
    with pytest.raises(TypeError, match=f"inverse_indices.*{named}"):
        BaseBatch(features, features.stride(), {})
    varying = KeyedJaggedTensor(
        KEYS,
        features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
    )
    with pytest.raises(ValueError, match=f"VBE.*{named}"):
        BaseBatch(varying, features.stride(), {})
