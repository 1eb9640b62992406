"""Initial values of sharded tables, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch.nn import init
from torchrec.modules.embedding_configs import EmbeddingConfig

# They set each number by itself, so a table may be initialized in parts.
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


def check_init_fn(table: EmbeddingConfig) -> None:
    """Checks that a table can be initialized in parts.

    Raises:
        ValueError: its `init_fn` might need the whole table.
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
    """Sets rows of a table to their initial values, which depend on the seed, the table and the row alone.

    Applies `init_fn` to blocks of 8,192 rows on the host, each with its own random state. Other random states
    stay as they are. Needs the memory of one block.

    Args:
        rows: `[number of rows, embedding_dim]` on any device, set in place.
        first: number of the first of these rows in the whole table.
        table: the table; see `check_init_fn`.
        seed: seed of the values, at least 0.
    """
    end = first + len(rows)
    buffer = torch.empty(_ROWS_PER_BLOCK, table.embedding_dim, device="cpu")
    with torch.random.fork_rng(devices=[]):
        for start in range(first // _ROWS_PER_BLOCK * _ROWS_PER_BLOCK, end, _ROWS_PER_BLOCK):
            stop = min(start + _ROWS_PER_BLOCK, table.num_embeddings)
            # Whole, even where the rank has a part: that part does not depend on how ranks divide the table.
            block = buffer[: stop - start]
            torch.default_generator.manual_seed(_seed_of_block(seed, table.name, start // _ROWS_PER_BLOCK))
            table.init_fn(block)
            low, high = max(start, first), min(stop, end)
            rows[low - first : high - first] = block[low - start : high - start].to(rows.device)


def _seed_of_block(seed: int, table: str, block: int) -> int:
    # Not Python's hash, which differs between processes.
    digest = blake2b(f"{seed}/{block}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
