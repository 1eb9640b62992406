"""Copies of a training state in reusable host memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata

_Path = tuple[Hashable, ...]


class HostCopies:
    """Copies states to host memory, and reuses that memory for the next copy.

    CUDA tensors are copied to pinned memory, with one wait for all of them. PyTorch rounds the size of pinned
    memory up to a power of two. A tensor whose shape or dtype has changed gets new memory. The old memory is
    released, and so is the memory of tensors that are no longer in the state.

    Attributes:
        tensors: tensors of the last copy, by their path of keys and indices in the state.
    """

    def __init__(self) -> None:
        self.tensors: dict[_Path, torch.Tensor] = {}

    def copy(self, state: Any) -> Any:
        """Returns a host copy of nested dicts and lists of tensors, sharded tensors, and plain values.

        The copied tensors are valid until the next call.
        """
        devices: set[torch.device] = set()
        kept = self.tensors
        self.tensors = {}
        copied = self._copied(state, (), kept, devices)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _copied(
        self, value: Any, path: _Path, kept: dict[_Path, torch.Tensor], devices: set[torch.device]
    ) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(part, (*path, key), kept, devices) for key, part in value.items()}
        if isinstance(value, list | tuple):
            parts = (self._copied(part, (*path, index), kept, devices) for index, part in enumerate(value))
            return type(value)(parts)
        if isinstance(value, ShardedTensor):
            tensors = [shard.tensor for shard in value.local_shards()]
            return _with_shards(value, self._copied(tensors, path, kept, devices))
        if not isinstance(value, torch.Tensor):
            return value
        source = value.detach()
        buffer = kept.pop(path, None)
        layout = (source.dtype, source.shape, source.is_cuda)  # GPU tensors go to pinned memory
        if buffer is None or (buffer.dtype, buffer.shape, buffer.is_pinned()) != layout:
            del buffer  # frees it first, because two copies of a large table might not fit
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda, device="cpu")
        self.tensors[path] = buffer.copy_(source, non_blocking=True)
        if source.is_cuda:
            devices.add(source.device)
        return buffer


def _with_shards(value: ShardedTensor, tensors: list[torch.Tensor]) -> ShardedTensor:
    """Returns a sharded tensor like `value` whose local shards are `tensors`, on the host."""
    # ShardedTensor.cpu() copies neither shards on the CPU nor tables that the GPU keeps in host memory.
    metadata = value.metadata()
    on_cpu = []
    for shard in metadata.shards_metadata:
        placement: Any = shard.placement
        placed = f"rank:{placement.rank()}/cpu"
        on_cpu.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement=placed))
    by_offset = {tuple(shard.shard_offsets): shard for shard in on_cpu}
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [
            Shard(tensor, by_offset[tuple(shard.metadata.shard_offsets)])
            for tensor, shard in zip(tensors, value.local_shards(), strict=True)
        ],
        ShardedTensorMetadata(on_cpu, metadata.size, metadata.tensor_properties),
        process_group=value._process_group,
    )
