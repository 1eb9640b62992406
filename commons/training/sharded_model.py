"""Sharding of a model over the ranks: embedding tables by rows, and replicas of everything else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn import init
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from ..unbounded_ids import UnboundedEmbeddingCollection, UnboundedEmbeddingCollectionSharder
from .run_log import warn_once
from .training_args import OptimizerArgs

# These set each element independently, so a table can be initialized block by block.
_ELEMENTWISE: tuple[Callable[..., Any], ...] = (
    init.uniform_,
    init.normal_,
    init.trunc_normal_,
    init.constant_,
    init.zeros_,
    init.ones_,
)
# Changing this changes the initial values.
_ROWS_PER_BLOCK = 8192


def shard_model(
    model: nn.Module, optimizer_args: OptimizerArgs, device: torch.device, cached: bool = False
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shards a model's embedding collections by rows, and replicates everything else under DDP.

    Shards every `EmbeddingCollection` and `UnboundedEmbeddingCollection`, and fuses the optimizer of their
    tables into backward. fbgemm has no fused Adam on the CPU: row-wise Adagrad replaces it there for tables,
    and rank 0 logs a warning. Collective over all ranks.

    A collection on the meta device may be larger than a rank's memory. Each rank creates only its own rows,
    block by block, from each table's `init_fn` and rank 0's `torch.initial_seed()`. Initial values depend on
    the seed, the table's name, and the row, but not on the number of ranks. A collection on any other device
    keeps its values, but every rank needs host memory for the whole tables.

    Args:
        model: the model, on any device.
        optimizer_args: the optimizer of tables and dense parameters.
        device: device of this rank.
        cached: whether tables stay in host memory with a cache on the GPU, as the "prefetch" pipeline needs.
            An `UnboundedEmbeddingCollection` is never cached, because its rows are reset in place.

    Returns:
        The sharded model, and one optimizer for tables and dense parameters.

    Raises:
        ValueError: a table of unbounded ids has too few rows for the number of ranks, or a table on the meta
            device has an `init_fn` that is not elementwise.
    """
    collections = _collections(model)
    for collection in collections.values():
        for table in _meta_tables(collection).values():
            check_init_fn(table)
    if collections and optimizer_args.optimizer_str == "adam" and device.type == "cpu":
        warn_once(
            "fbgemm has no fused Adam on CPU: embedding tables train with row-wise Adagrad, dense parameters "
            "with Adam"
        )
    fused_params = _fused_params(optimizer_args, device)
    cached_params = fused_params | {"prefetch_pipeline": True} if cached else fused_params
    ordinary = EmbeddingCollectionSharder(fused_params=cached_params)
    unbounded = UnboundedEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused_params=fused_params))
    plan = {
        path: _by_rows(module, unbounded, "fused", device)
        if isinstance(module, UnboundedEmbeddingCollection)
        else _by_rows(module, ordinary, "fused_uvm_caching" if cached else "fused", device)
        for path, module in collections.items()
    }
    sharded = DistributedModelParallel(
        model, device=device, plan=ShardingPlan(plan), sharders=[ordinary, unbounded]
    )
    sharded.to(device)  # after sharding, because a device may be too small for whole tables
    _initialize(sharded, collections, device)
    fused = dict(sharded.fused_optimizer.params)
    dense = {
        name: parameter
        for name, parameter in sharded.named_parameters()
        if parameter.requires_grad and name not in fused
    }
    optimizers = [sharded.fused_optimizer]
    if dense:
        optimizers.append(KeyedOptimizerWrapper(dense, lambda parameters: _dense(parameters, optimizer_args)))
    return sharded, CombinedOptimizer(optimizers)


def _collections(module: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Returns the outermost embedding collections of a module, by path."""
    if isinstance(module, EmbeddingCollection | UnboundedEmbeddingCollection):
        return {path: module}
    return {
        found: collection
        for name, child in module.named_children()
        for found, collection in _collections(child, f"{path}.{name}" if path else name).items()
    }


def _by_rows(
    module: Any, sharder: ModuleSharder, kernel: str, device: torch.device
) -> EmbeddingModuleShardingPlan:
    return construct_module_sharding_plan(
        module,
        # Explicit, because the default on CPU is the dense kernel, which sums instead of looking up.
        {config.name: row_wise(compute_kernel=kernel) for config in module.embedding_configs()},
        sharder=sharder,
        device_type=device.type,
    )


def _meta_tables(collection: Any) -> dict[str, EmbeddingConfig]:
    """Returns the tables on the meta device, by parameter name."""
    configs = {config.name: config for config in collection.embedding_configs()}
    return {
        name: configs[name.split(".")[-2]]
        for name, parameter in collection.named_parameters()
        if parameter.is_meta
    }


def _initialize(sharded: DistributedModelParallel, collections: dict[str, Any], device: torch.device) -> None:
    """Initializes this rank's rows of the tables that were on the meta device."""
    meta_tables = {path: _meta_tables(collection) for path, collection in collections.items()}
    if not any(meta_tables.values()):
        return
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(seed, 0)  # two ranks may share a block of rows, so all need the same seed
    for path, tables in meta_tables.items():
        state = sharded.module.get_submodule(path).state_dict()
        for name, table in tables.items():
            for shard in state[name].local_shards():
                initialize_rows(shard.tensor, shard.metadata.shard_offsets[0], table, int(seed))


def _dense(parameters: list[nn.Parameter], args: OptimizerArgs) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if args.optimizer_str == "adam":
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.Adam(parameters, betas=betas, eps=args.adam_eps, **common)
    if args.optimizer_str == "adagrad":
        return torch.optim.Adagrad(parameters, **common)
    return torch.optim.SGD(parameters, **common)


def _fused_params(args: OptimizerArgs, device: torch.device) -> dict[str, Any]:
    optimizer = {
        "adam": EmbOptimType.ADAM,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "sgd": EmbOptimType.EXACT_SGD,
    }[args.optimizer_str]
    params: dict[str, Any] = {"optimizer": optimizer, "learning_rate": args.learning_rate}
    if optimizer is EmbOptimType.ADAM:
        if device.type == "cpu":
            params["optimizer"] = EmbOptimType.EXACT_ROWWISE_ADAGRAD
        else:
            params |= {"beta1": args.adam_beta1, "beta2": args.adam_beta2}
        params["eps"] = args.adam_eps
    return params


def check_init_fn(table: EmbeddingConfig) -> None:
    """Checks that a table can be initialized block by block.

    Raises:
        ValueError: `init_fn` has its own generator, or is not known to be elementwise.
    """
    is_partial = isinstance(table.init_fn, partial)
    function = table.init_fn.func if is_partial else table.init_fn
    if is_partial and "generator" in table.init_fn.keywords:
        raise ValueError(
            f"init_fn of table {table.name!r} has a generator of its own, and each block of rows is drawn "
            "from its own random state: leave the generator out"
        )
    if function not in _ELEMENTWISE:
        names = ", ".join(known.__name__ for known in _ELEMENTWISE)
        raise ValueError(
            f"table {table.name!r} is on the meta device and its init_fn is {function!r}; expected one of "
            f"{names} of torch.nn.init, or a functools.partial of one, because no rank has the whole table: "
            "create the collection on the CPU for any other init_fn"
        )


@torch.no_grad()
def initialize_rows(rows: torch.Tensor, first: int, table: EmbeddingConfig, seed: int) -> None:
    """Sets rows of a table to their initial values, which depend only on the seed, the table, and the row.

    Applies `init_fn` on the host to blocks of 8,192 rows, each with its own random state. Needs host memory
    for one block, and leaves the global random state unchanged.

    Args:
        rows: `[num_rows, embedding_dim]` on any device, set in place.
        first: index of the first of these rows in the whole table.
        table: table that `check_init_fn` accepts.
        seed: seed of the values.
    """
    end = first + len(rows)
    buffer = torch.empty(_ROWS_PER_BLOCK, table.embedding_dim, device="cpu")
    with torch.random.fork_rng(devices=[]):
        for start in range(first // _ROWS_PER_BLOCK * _ROWS_PER_BLOCK, end, _ROWS_PER_BLOCK):
            stop = min(start + _ROWS_PER_BLOCK, table.num_embeddings)
            # Always a whole block, so that the values do not depend on how ranks divide the table.
            block = buffer[: stop - start]
            torch.default_generator.manual_seed(_seed_of_block(seed, table.name, start // _ROWS_PER_BLOCK))
            table.init_fn(block)
            low, high = max(start, first), min(stop, end)
            rows[low - first : high - first] = block[low - start : high - start].to(rows.device)


def _seed_of_block(seed: int, table: str, block: int) -> int:
    # Python's own hash differs between processes.
    digest = blake2b(f"{seed}/{block}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
