"""Balancing under TorchRec's 2D sharding: two replicas of the tables, each on two of four ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from commons.check_equal import check_equal
from commons.distributed import BatchShuffler, IdentityShuffler
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import CPU, RankingModel, pipeline_of, sharded_ranking_model
from tests.on_ranks import on_ranks

RANKS, RANKS_PER_REPLICA, STEPS = 4, 2, 5
# SGD's rate is so large that the rounding of a weight does not show in its change.
OPTIMIZERS = {"sgd": (EmbOptimType.EXACT_SGD, 3.0), "adagrad": (EmbOptimType.EXACT_ADAGRAD, 0.3)}

# First row, rows, and what training changed in them, by name.
Parameters = dict[str, tuple[int, torch.Tensor, torch.Tensor]]


class TwoDimensions(DMPCollection):
    """`DMPCollection` on CPUs; TorchRec's own refuses any device but GPUs, and numbers them by rank."""

    def __init__(self, model: torch.nn.Module, plan: ShardingPlan, sharder: Any) -> None:
        super().__init__(
            model,
            device=torch.device("cuda"),
            plan=plan,
            world_size=RANKS,
            sharding_group_size=RANKS_PER_REPLICA,
            global_pg=dist.group.WORLD,
            sharders=[sharder],
        )

    def _create_process_groups(self, *args: Any, **kwargs: Any) -> Any:
        self._device = CPU
        return super()._create_process_groups(*args, **kwargs)

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **kwargs: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **kwargs)
        for tables in plan.plan.values():
            for sharding in tables.values():
                for shard in sharding.sharding_spec.shards:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    def _init_dmp(self, module: torch.nn.Module) -> torch.nn.Module:
        self.device = CPU
        return super()._init_dmp(module)


def _sharded(optimizer: str, is_2d: bool) -> DistributedModelParallel:
    model = RankingModel()
    kind, learning_rate = OPTIMIZERS[optimizer]
    sharder = EmbeddingCollectionSharder(fused_params={"optimizer": kind, "learning_rate": learning_rate})
    num_shards = RANKS_PER_REPLICA if is_2d else RANKS
    tables = construct_module_sharding_plan(
        model.tables,
        {table.name: row_wise(compute_kernel="fused") for table in model.tables.embedding_configs()},
        sharder=sharder,
        local_size=num_shards,
        world_size=num_shards,
        device_type="cpu",
    )
    plan = ShardingPlan({"tables": tables})
    if is_2d:
        return TwoDimensions(model, plan, sharder)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def _shuffler(among: str, model: DistributedModelParallel) -> BatchShuffler:
    if among == "nobody":
        return IdentityShuffler()
    if among == "all":
        return TokenShuffler()
    return TokenShuffler(model.device_mesh.get_group({"a replica": "shard", "a shard": "replicate"}[among]))


def _local(value: Any) -> tuple[int, torch.Tensor]:
    """First row and rows of this rank of a value in a state."""
    if hasattr(value, "local_shards"):
        (shard,) = value.local_shards()
        return shard.metadata.shard_offsets[0], shard.tensor.clone()
    if hasattr(value, "to_local"):
        local = value.to_local()
        return local.local_offsets()[0][0], local.local_shards()[0].clone()
    return 0, value.clone()


def _pipeline(
    optimizer: str, shuffler: Callable[[Any], BatchShuffler], is_2d: bool, name: str, **more: Any
) -> Any:
    model = _sharded(optimizer, is_2d)
    dense = [value for name, value in model.named_parameters() if name.startswith("dense.")]
    return pipeline_of(name, model, torch.optim.SGD(dense, 0.1), shuffler(model), **more)


def _trained(optimizer: str, among: str, is_2d: bool, name: str, interval: int) -> Parameters:
    """Trains some steps; returns the parameters on this rank, and what training changed.

    Args:
        among: the ranks that balance: "nobody", "all", "a replica" (two ranks with all rows of the tables
            between them) or "a shard" (two with the same rows).
        interval: steps between two averages of the replicas.
    """
    more = {"dmp_collection_sync_interval_batches": interval} if interval > 1 else {}
    pipeline = _pipeline(optimizer, partial(_shuffler, among), is_2d, name, **more)
    model = pipeline._model
    start = {name: _local(value) for name, value in model.state_dict().items()}
    rng = np.random.default_rng(dist.get_rank())
    batches = iter([draw_histories(rng, 6) for _ in range(STEPS)])
    before = after = 0.0
    for _ in range(STEPS):
        pipeline.progress(batches)
        before += pipeline.report.imbalance_before
        after += pipeline.report.imbalance_after
    assert (after < before) == (among != "nobody")
    return {
        name: (first, rows, rows - start[name][1])
        for name, (first, rows) in ((name, _local(value)) for name, value in model.state_dict().items())
    }


def _changes(
    pools: Any, optimizer: str, among: str, is_2d: bool = True, name: str = "native", interval: int = 1
) -> dict[str, torch.Tensor]:
    """Returns the change of each whole parameter, after checking that ranks with the same rows agree."""
    of_ranks = pools(RANKS).run(_trained, optimizer, among, is_2d, name, interval)
    whole = {}
    for name in of_ranks[0]:
        shards: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for of_rank in of_ranks:
            first, rows, change = of_rank[name]
            assert torch.equal(rows, shards.setdefault(first, (rows, change))[0]), name
        whole[name] = torch.cat([change for _, (_, change) in sorted(shards.items())])
    return whole


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], part: str) -> float:
    """The largest relative L2 difference of a parameter's change, among those of a part of the model."""
    norms = {name: float(one[name].norm()) for name in one if name.startswith(part)}
    assert any(norms.values())
    return max(float((one[name] - other[name]).norm()) / (norms[name] or 1.0) for name in norms)


@pytest.fixture(scope="module")
def one_replica(pools):
    return _changes(pools, "sgd", "nobody", is_2d=False)


@pytest.mark.parametrize(
    ("among", "name"),
    [*product(["nobody", "all", "a replica", "a shard"], ["native"]), ("all", "none")],
)
def test_sgd_learns_what_it_learns_with_one_replica(pools, one_replica, among, name):
    changes = _changes(pools, "sgd", among, name=name)
    for part in ("tables", "dense"):
        assert _difference(one_replica, changes, part) < 1e-4


@pytest.mark.parametrize("interval", [1, 2])
def test_balancing_within_a_replica_is_exact_with_an_adaptive_optimizer(pools, interval):
    plain, within, among_all = (
        _changes(pools, "adagrad", among, interval=interval) for among in ("nobody", "a replica", "all")
    )
    for part in ("tables", "dense"):
        assert _difference(plain, within, part) < 1e-4
    # Each replica's Adagrad squares the gradients of its own samples.
    assert _difference(plain, among_all, "tables") > 1e-2


@on_ranks(RANKS)
def test_the_shipped_check_compares_replicas_and_ranks_that_balance_alone():
    drawn = [draw_histories(np.random.default_rng((dist.get_rank(), step)), 6) for step in range(2)]
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2], [3]])

    def of_replicas(enabled: bool) -> tuple[Any, list[Any]]:
        def shuffler(model: Any) -> BatchShuffler:
            return TokenShuffler(model.device_mesh.get_group("shard"), enabled=enabled)

        return _pipeline("sgd", shuffler, True, "native"), drawn

    def of_some(enabled: bool) -> tuple[Any, list[Any]]:
        return pipeline_of("native", *sharded_ranking_model(0.1), TokenShuffler(own, enabled=enabled)), drawn

    replicas, some = check_equal(of_replicas, 2), check_equal(of_some, 2)
    assert replicas.is_equal and some.is_equal and some.samples_moved > 0
    assert any("item_table" in name for name in replicas.differences)
