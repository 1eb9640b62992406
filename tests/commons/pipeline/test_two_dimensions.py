"""Balancing under TorchRec's 2D sharding: two replicas of the tables, each on two of four ranks."""

from typing import Any

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
from tests.commons.histories import TokenShuffler
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    RankingModel,
    loaded_histories,
    pipeline_of,
    sharded_ranking_model,
)
from tests.on_ranks import on_ranks

RANKS, RANKS_PER_REPLICA, STEPS = 4, 2, 5
# SGD's rate is so large that the rounding of a weight does not show in its change.
OPTIMIZERS = {"sgd": (EmbOptimType.EXACT_SGD, 3.0), "adagrad": (EmbOptimType.EXACT_ADAGRAD, 0.3)}

Shards = dict[tuple[str, int], torch.Tensor]  # parts of parameters, by name and first row


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


def _shuffler(among: str, model: DistributedModelParallel, enabled: bool) -> BatchShuffler:
    if among == "nobody":
        return IdentityShuffler()
    mesh = {"a replica": "shard", "a shard": "replicate"}.get(among)
    return TokenShuffler(mesh and model.device_mesh.get_group(mesh), enabled=enabled)


def _pipeline(
    optimizer: str, among: str, is_2d: bool, name: str, interval: int = 1, enabled: bool = True
) -> Any:
    """Makes a pipeline whose replicas are averaged every `interval` steps.

    "a replica" has two ranks with all rows of the tables between them, and "a shard" two with the same rows.
    """
    model = _sharded(optimizer, is_2d)
    dense = [value for name, value in model.named_parameters() if name.startswith("dense.")]
    more = {"dmp_collection_sync_interval_batches": interval} if interval > 1 else {}
    shuffler = _shuffler(among, model, enabled)
    return pipeline_of(name, model, torch.optim.SGD(dense, 0.1), shuffler, **more)


def _trained(optimizer: str, among: str, is_2d: bool, name: str, interval: int) -> tuple[Shards, Shards]:
    """Trains some steps; returns the parameters on this rank before and after."""
    pipeline = _pipeline(optimizer, among, is_2d, name, interval)
    start = shards_of(pipeline._model)
    batches = iter(loaded_histories(STEPS, rows=6))
    before = after = 0.0
    for _ in range(STEPS):
        pipeline.progress(batches)
        before += pipeline.report.imbalance_before
        after += pipeline.report.imbalance_after
    assert (after < before) == (among != "nobody")
    return start, shards_of(pipeline._model)


def _changes(
    pools: Any, optimizer: str, among: str, is_2d: bool = True, name: str = "native", interval: int = 1
) -> dict[str, torch.Tensor]:
    """Returns the change of each whole parameter, after checking that ranks with the same rows agree."""
    whole: Shards = {}
    starts: Shards = {}
    for before, after in pools(RANKS).run(_trained, optimizer, among, is_2d, name, interval):
        starts |= before
        for part, rows in after.items():
            assert torch.equal(rows, whole.setdefault(part, rows)), part
    names = {name for name, _ in whole}
    return {
        of: torch.cat([whole[part] - starts[part] for part in sorted(whole) if part[0] == of]) for of in names
    }


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
    [("all", "native"), ("a replica", "native"), ("a shard", "native"), ("all", "none")],
)
def test_sgd_learns_what_it_learns_with_one_replica(pools, one_replica, among, name):
    changes = _changes(pools, "sgd", among, name=name)
    for part in ("tables", "dense"):
        assert _difference(one_replica, changes, part) < 1e-4


@pytest.mark.parametrize("interval", [1, 2])
def test_balancing_within_a_replica_is_exact_with_an_adaptive_optimizer(pools, interval):
    plain, within = (
        _changes(pools, "adagrad", among, interval=interval) for among in ("nobody", "a replica")
    )
    for part in ("tables", "dense"):
        assert _difference(plain, within, part) < 1e-4


@on_ranks(RANKS)
def test_the_shipped_check_compares_replicas_and_ranks_that_balance_alone():
    drawn = loaded_histories(2, rows=6)
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2], [3]])

    def of_replicas(enabled: bool) -> tuple[Any, list[Any]]:
        return _pipeline("sgd", "a replica", True, "native", enabled=enabled), drawn

    def of_some(enabled: bool) -> tuple[Any, list[Any]]:
        return pipeline_of("native", *sharded_ranking_model(0.1), TokenShuffler(own, enabled=enabled)), drawn

    replicas, some = check_equal(of_replicas, 2), check_equal(of_some, 2)
    assert replicas.is_equal and some.is_equal and some.samples_moved > 0
    assert any("item_table" in name for name in replicas.differences)
