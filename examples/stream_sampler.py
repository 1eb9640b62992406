"""Balances a stream as it is loaded: torchrun --nproc_per_node 2 examples/stream_sampler.py

If users and costs are known before loading, no sample needs to move between ranks. Each step has the samples
that it would have without balancing, and all ranks have equal numbers of rows.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler
from workload_balancer.extensions.sample_groups import rebalance_groups
from workload_balancer.first_cause import show_first_cause_only

ROWS, ITEMS = 16, 300


class StreamSampler(Sampler[list[int]]):
    """One rank's rows of each global batch of a stream; the `batch_sampler` of a `DataLoader`.

    The next `rows * num_ranks` samples, in time order, make a global batch. Ranks divide it by cost and keep
    each user's samples together. All ranks compute the same deal, without communication. The last samples,
    which fill no global batch, are not loaded: the next stream can begin with them.

    Users are integers of at least 0. A negative number means no user.

    `state_dict` counts samples, so another number of ranks can resume. It counts loaded samples, but workers
    run ahead of training: count trained samples, as below. docs/works-with.md shows the same for torchdata's
    `StatefulDataLoader`.
    """

    def __init__(self, users: np.ndarray, costs: np.ndarray, rows: int, rank: int, num_ranks: int) -> None:
        self.users, self.costs, self.rank, self.num_ranks = users, costs, rank, num_ranks
        self.global_rows = rows * num_ranks
        self.start = self.taken = 0

    def __len__(self) -> int:
        return (len(self.users) - self.start) // self.global_rows

    def __iter__(self) -> Iterator[list[int]]:
        begin, self.start = self.start, 0
        self.taken = begin
        round_robin = np.arange(self.global_rows) % self.num_ranks  # where the search begins
        while (end := begin + self.global_rows) <= len(self.users):
            users, costs = self.users[begin:end], self.costs[begin:end]
            deal = rebalance_groups(costs, round_robin, self.num_ranks, groups=users)
            self.taken = end
            yield (begin + deal[self.rank]).tolist()
            begin = end

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.taken = state["samples"]


class Listens(Dataset[tuple[torch.Tensor, float]]):
    """Events in time order. A sample is a user's items so far, and whether the last one was liked."""

    def __init__(self, num_events: int = 700) -> None:
        drawn = np.random.default_rng(0)
        self.users = (40 * drawn.random(num_events) ** 3).astype(np.int64)
        self.items = drawn.integers(ITEMS, size=num_events)
        self.events = {user: np.flatnonzero(self.users == user) for user in range(40)}
        self.lengths = np.empty(num_events, dtype=np.int64)
        for events in self.events.values():
            self.lengths[events] = 1 + np.arange(len(events))

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        so_far = self.events[self.users[index]][: self.lengths[index]]
        items = torch.from_numpy(self.items[so_far])
        return items, float(items[-1] < ITEMS // 3)


def collate(rows: list[tuple[torch.Tensor, float]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    items, liked = zip(*rows, strict=True)
    return list(items), torch.tensor(liked)


class LikeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.out = torch.nn.Embedding(ITEMS, 16), torch.nn.Linear(16, 1)

    def forward(self, items: list[torch.Tensor]) -> torch.Tensor:
        last = []
        for history in map(self.items, items):
            attended = functional.scaled_dot_product_attention(history[-1:], history, history)
            last.append(history[-1:] + attended)
        return self.out(torch.cat(last)).squeeze(1)


def train(steps: int, checkpoint: dict | None = None) -> tuple[torch.Tensor, dict]:
    torch.manual_seed(1)
    stream, rank, num_ranks = Listens(), dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(LikeModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = StreamSampler(stream.users, 100 + stream.lengths, ROWS, rank, num_ranks)
    trained = 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        sampler.load_state_dict(checkpoint["sampler"])
        trained = checkpoint["sampler"]["samples"]
    losses = []
    for items, liked in DataLoader(stream, batch_sampler=sampler, collate_fn=collate, num_workers=2):
        # All ranks have equal numbers of rows, so the mean of their means is that of the global batch.
        loss = functional.binary_cross_entropy_with_logits(model(items), liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() / num_ranks)
        trained += sampler.global_rows
        if len(losses) == steps:
            break
    losses = torch.stack(losses) if losses else torch.zeros(0)
    dist.all_reduce(losses)
    return losses, {"model": model.state_dict(), "sampler": {"samples": trained}}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    show_first_cause_only()
    first, checkpoint = train(steps=10)
    rest, _ = train(steps=100, checkpoint=checkpoint)
    for loss in torch.cat([first, rest]) if dist.get_rank() == 0 else ():
        print(f"loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
