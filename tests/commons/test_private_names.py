"""Tests that each private name of torch, TorchRec and numba that this project reads exists.

A new version may rename them without notice. Other tests cover how they behave.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numba import njit
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import filesystem, metadata
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection as ShardedCollection
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

from tests.commons.unbounded_ids.sharded_tables import Table

REPOSITORY = Path(__file__).parents[2]


def _pipeline(kind: Callable[..., Any], table: Table) -> Any:
    return kind(table.state.model, table.state.optimizer, torch.device("cpu"))


def _sharded_tensor(table: Table) -> ShardedTensor:
    return next(
        value for value in table.state.model.state_dict().values() if isinstance(value, ShardedTensor)
    )


def _collision_module(table: Table) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(8, torch.device("cpu"), LRU_EvictionPolicy(), 1)


def _static_graph(table: Table) -> Any:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)


def _lookup(table: Table) -> Any:
    return table.collection._embedding_module._lookups[0]


def _dispatcher(table: Table) -> Any:
    return njit(cache=True)(_dispatcher)


# By owner: how to get it on a rank with a sharded table, and its names.
READ: dict[str, tuple[Callable[[Table], Any], str]] = {
    "torch": (lambda t: torch, "_C"),
    "Tensor": (lambda t: torch.ones(1), "_version"),
    "torch._C": (lambda t: torch._C, "_autograd"),
    "torch._C._autograd": (lambda t: torch._C._autograd, "_top_saved_tensors_default_hooks"),
    "Parameter": (lambda t: torch.nn.Parameter(torch.ones(1)), "_backward_hooks"),
    "DistributedDataParallel": (
        _static_graph,
        "_pre_forward _post_forward _static_graph_delay_allreduce_enqueued",
    ),
    "iterators of data loaders": (lambda t: iter(torch.utils.data.DataLoader([0])), "_num_yielded"),
    "torch.autograd": (lambda t: torch.autograd, "_profiler_enabled"),
    "torch.autograd.Variable": (lambda t: torch.autograd.Variable, "_execution_engine"),
    "torch.distributed": (lambda t: dist, "_shard"),
    "distributed_c10d": (lambda t: dist.distributed_c10d, "_get_default_store _world"),
    "ProcessGroup": (lambda t: dist.group.WORLD, "_get_backend"),
    "Options": (lambda t: dist.group.WORLD._get_backend(torch.device("cpu")).options, "_timeout"),
    "checkpoints on disk": (lambda t: filesystem, "_StorageInfo"),
    "checkpoint metadata": (lambda t: metadata, "_MEM_FORMAT_ENCODING"),
    "torch.serialization": (lambda t: torch.serialization, "_get_layout"),
    "Module": (lambda t: torch.nn.Module, "_apply"),
    "NestedTensor": (
        lambda t: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        "_ragged_idx",
    ),
    "ShardedTensor": (_sharded_tensor, "_init_from_local_shards_and_global_metadata _process_group"),
    "TrainPipelineSparseDist": (
        lambda t: _pipeline(TrainPipelineSparseDist, t),
        "_data_dist_stream _execute_all_batches _memcpy_stream _model _next_batch _pipeline_model "
        "_pipelined_modules _pipelined_postprocs _stream_context",
    ),
    "prefetching": (lambda t: _pipeline(PrefetchTrainPipelineSparseDist, t), "_prefetch_stream"),
    "eviction policy": (lambda t: LRU_EvictionPolicy, "_compute_selected_eviction_and_replacement_indices"),
    "MCHManagedCollisionModule": (
        _collision_module,
        "_current_iter _evicted_emb_indices _input_history_buffer_size _mch_metadata "
        "_mch_remapped_ids_mapping _mch_sorted_raw_ids _name _output_global_offset "
        "_output_segments_tensor _sort_mch_buffers _update_and_evict _zch_size",
    ),
    "ShardedManagedCollisionEmbeddingCollection": (lambda t: ShardedCollection, "_evict"),
    "sharded collection": (lambda t: t.collection, "_embedding_module _env _managed_collision_collection"),
    "collisions": (lambda t: t.collection._managed_collision_collection, "_managed_collision_modules"),
    "sharded embedding module": (lambda t: t.collection._embedding_module, "_lookups"),
    "lookup": (_lookup, "_emb_modules"),
    "kernel": (lambda t: _lookup(t)._emb_modules[0], "_config _emb_module"),
    "sharder": (lambda t: ManagedCollisionEmbeddingCollectionSharder(), "_e_sharder _mc_sharder"),
    "numba's dispatcher": (_dispatcher, "_cache"),
}
NAMES = [(owner, name) for owner, (_, names) in READ.items() for name in names.split()]


def _missing() -> dict[str, str]:
    """Returns the error of each name that cannot be read."""
    table, missing = Table(8, "lru"), {}
    for owner, name in NAMES:
        try:
            getattr(READ[owner][0](table), name)
        except Exception as error:  # an owner may be unreachable because another name is gone
            missing[f"{owner}.{name}"] = f"{type(error).__name__}: {error}"
    return missing


def test_each_is_still_there(pools):
    assert pools(1).run(_missing) == [{}]


def _own_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def _private_names_read(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields each name read, and whether it certainly belongs to another package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for part in (node.module or "").split("."):
                yield part, True
        elif isinstance(node, ast.Attribute):
            of = node.value
            if not (isinstance(of, ast.Name) and of.id in sys.stdlib_module_names):
                yield node.attr, isinstance(of, ast.Call) and ast.unparse(of.func) == "super"


def test_all_that_are_read_are_listed():
    packages = [REPOSITORY / package for package in ("commons", "hstu", "sid_gr")]
    trees = [ast.parse(path.read_text()) for package in packages for path in package.rglob("*.py")]
    ours = {name for tree in trees for name in _own_names(tree)}
    read = {
        name
        for tree in trees
        for name, is_others in _private_names_read(tree)
        if name.startswith("_") and not name.startswith("__") and (is_others or name not in ours)
    }
    read -= {"_asdict", "_replace"}  # public methods of named tuples, despite the underscore
    assert read - {name for _, name in NAMES} == set()
