"""Tables that ranks create shard by shard."""

import resource
from functools import partial
from itertools import pairwise

import gin
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import init
from torchrec import EmbeddingCollection, EmbeddingConfig

from commons.datasets.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, shard_model
from commons.unbounded_ids import UnboundedEmbeddingCollection
from hstu.training.ranking_task import ranking_task
from tests.commons.training.internals import initialize_rows
from tests.e2e.gin_files import RANDOM_DATA
from tests.process_pool import ProcessPool

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, WIDTH = 20_001, 4  # two whole blocks and a part


def _table(name: str, rows: int = ROWS, **settings) -> EmbeddingConfig:
    return EmbeddingConfig(rows, WIDTH, name, feature_names=[name], **settings)


class _Tables(nn.Module):
    """Tables of all kinds on the meta device, next to a dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        normal = _table("normal", init_fn=partial(init.normal_, std=3.0))
        self.ordinary = EmbeddingCollection([_table("one"), _table("few", 7), normal], device=META)
        self.dynamic = UnboundedEmbeddingCollection([_table("two")], {"two": "lru"}, META)
        self.dense = nn.Parameter(torch.ones(2))


def _shards(seed: int) -> dict[str, tuple[int, torch.Tensor]]:
    """First row and rows of this rank's shard of each table."""
    torch.manual_seed(seed + 1000 * dist.get_rank())
    model, _ = shard_model(_Tables(), OptimizerArgs("adagrad", 0.1), CPU)
    shards = {}
    for name, value in model.state_dict().items():
        if name.endswith(".weight"):
            (shard,) = value.local_shards()
            shards[name.split(".")[-2]] = shard.metadata.shard_offsets[0], shard.tensor.clone()
    return shards


def _whole(pools, num_ranks: int, seed: int = 1) -> dict[str, torch.Tensor]:
    by_rank = pools(num_ranks).run(_shards, seed)
    whole = {}
    for name in by_rank[0]:
        parts = [shards[name] for shards in by_rank]
        starts = [first for first, _ in parts]
        assert starts == sorted(set(starts)) and len(starts) == num_ranks
        whole[name] = torch.cat([rows for _, rows in parts])
    return whole


def test_initial_values_depend_on_seed_table_and_row_alone(pools):
    one = _whole(pools, 1)
    assert {name: len(rows) for name, rows in one.items()} == dict(one=ROWS, few=7, normal=ROWS, two=ROWS)
    for again in (_whole(pools, 2), _whole(pools, 3), _whole(pools, 1)):
        assert all(torch.equal(one[name], again[name]) for name in one)
    other = _whole(pools, 2, seed=2)
    for different in (other["one"], one["two"]):
        assert not (one["one"] == different).all(1).any()
    assert len(one["one"].unique(dim=0)) == ROWS


def test_initial_values_are_distributed_as_torchrec_and_users_distribute_them(pools):
    values = _whole(pools, 2)
    for name, rows in (("one", ROWS), ("two", ROWS), ("few", 7)):
        bound = rows**-0.5
        assert bound / 2 < values[name].abs().max() <= bound
    assert values["one"].std() == pytest.approx(ROWS**-0.5 / 3**0.5, rel=0.02)
    assert values["one"].mean().abs() < 0.02 * ROWS**-0.5
    assert values["normal"].std() == pytest.approx(3, rel=0.02)


@given(cuts=st.lists(st.integers(0, ROWS), max_size=4), seed=st.integers(0, 2**63 - 1))
def test_any_division_of_a_table_gives_the_same_rows(cuts, seed):
    table, bounds = _table("one"), sorted([0, *cuts, ROWS])
    whole, parts = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    initialize_rows(whole, 0, table, seed)
    state = torch.get_rng_state()
    for start, end in pairwise(bounds):
        initialize_rows(parts[start:end], start, table, seed)
    assert torch.equal(whole, parts)
    assert torch.equal(torch.get_rng_state(), state)


def _rows_by_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.arange(len(weight)).unsqueeze(1))


@pytest.mark.parametrize("init_fn", [_rows_by_place, init.xavier_uniform_, partial(init.eye_)])
def test_an_init_fn_that_needs_the_whole_table_is_refused(init_fn):
    model = nn.ModuleList([EmbeddingCollection([_table("one", init_fn=init_fn)], device=META)])
    with pytest.raises(ValueError, match=r"table 'one' is on the meta device and its init_fn is <function"):
        shard_model(model, OptimizerArgs("sgd", 0.1), CPU)


CONFIG = """
item/{kind}EmbeddingArgs.feature_names = ["item"]
item/{kind}EmbeddingArgs.table_name = "item"
item/{kind}EmbeddingArgs.item_vocab_size_or_capacity = {rows}
BenchmarkDatasetArgs.embedding_args = [
    @item/{kind}EmbeddingArgs(), @action/EmbeddingArgs(), @user/EmbeddingArgs()]
NetworkArgs.item_embedding_dim = 128
"""
MANY = 400_000


def _growth(kind: str, rows: int) -> float:
    """Returns how much sharding a model adds to this process's peak memory, as a share of its table."""
    gin.parse_config(RANDOM_DATA + CONFIG.format(kind=kind, rows=rows))
    args, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shard_model(ranking_task(args, CPU).model, optimizer, CPU)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * 128 * rows)


@pytest.mark.parametrize("kind", ["", "Dynamic"])
def test_no_rank_ever_holds_a_whole_table(kind):
    pool = ProcessPool(2)  # new processes, whose memory has not been larger before
    pool.run(_growth, kind, 1000)  # what the first model loads does not count
    growths = pool.run(_growth, kind, MANY)
    pool.close()
    assert 0.45 < min(growths) <= max(growths) < 0.7
