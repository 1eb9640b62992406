"""The sharded modules in a model."""

from __future__ import annotations

import torch
from torchrec.distributed.types import ShardedModule


def outermost_sharded(module: torch.nn.Module) -> list[ShardedModule]:
    """Returns the sharded modules that no other sharded module contains, each once."""
    if isinstance(module, ShardedModule):
        return [module]
    return list(dict.fromkeys(found for child in module.children() for found in outermost_sharded(child)))
