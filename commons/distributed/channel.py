"""Messages between ranks on the host: each user of a gloo group has a channel of its own."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Channel:
    """Gathers host numbers and objects, apart from all other messages over the same group.

    Messages are point-to-point and carry the channel's tag. So threads with a channel each may use one group
    at the same time, in any order. On each channel, all ranks must make the same calls in the same order, one
    thread at a time.

    Attributes:
        rank: this process's place among the ranks.
        num_ranks: ranks that gather.
        group: gloo; None for a single rank.
        tag: message tag, unique to the channel within its group.
    """

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    tag: int

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """Gathers numbers `[n]`, the same n and dtype on every rank, to `[ranks, n]`.

        Takes ceil(log2(ranks)) rounds of one message each, where gloo's own gather passes rows around a ring
        in ranks - 1. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
        Message-Passing Systems", 1997.
        """
        table = np.empty((self.num_ranks, len(row)), dtype=row.dtype)
        table[0] = row
        rows, there = torch.from_numpy(table), 1  # of this rank, the next one, and so on
        while there < self.num_ranks:
            count = min(there, self.num_ranks - there)
            arriving = dist.irecv(
                rows[there : there + count],
                group=self.group,
                tag=self.tag,
                group_src=(self.rank + there) % self.num_ranks,
            )
            leaving = dist.isend(
                rows[:count],
                group=self.group,
                tag=self.tag,
                group_dst=(self.rank - there) % self.num_ranks,
            )
            for message in (arriving, leaving):
                if message is not None:
                    message.wait()
            there += count
        return np.roll(table, self.rank, axis=0)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Gathers anything that pickles, in two gathers: of sizes, and of bytes up to the largest."""
        if self.num_ranks == 1:
            return [value]
        pickled = np.frombuffer(to_bytes(value), dtype=np.uint8)
        sizes = self.all_gather(np.array([len(pickled)]))[:, 0]
        padded = np.zeros(sizes.max(), dtype=np.uint8)
        padded[: len(pickled)] = pickled
        table = self.all_gather(padded)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(table, sizes, strict=True)]


def to_bytes(value: Any) -> bytes:
    """Pickles anything, with tensors of dtypes that pickle itself refuses, such as uint16."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles dense tensors as bytes, a dtype and a shape."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.dtype == torch.uint8 or value.requires_grad:
            return NotImplemented
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            return NotImplemented
        flat = value.resolve_conj().resolve_neg().reshape(-1).clone()
        return _typed, (flat.view(torch.uint8), value.dtype, value.shape)


def _typed(flat: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return flat.view(dtype).view(shape)
