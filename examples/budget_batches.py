"""Fills batches to a budget, without an exchange: torchrun --nproc_per_node 2 examples/budget_batches.py

Each rank fills its batches from its own pool of samples, until their cost reaches the budget. So the ranks'
costs are close, but the samples of a step, and their number, differ from those of plain loading. The stage is
switched off and moves no sample. It averages over a step's loss tokens, and ends all ranks in the same step.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler
from torchrec import JaggedTensor, KeyedJaggedTensor
from workload_balancer.distributed import BatchShuffler
from workload_balancer.first_cause import show_first_cause_only
from workload_balancer.pipeline import TrainPipelineFactory

ITEMS, LONGEST, ROWS = 300, 200, 16


class BudgetSampler(Sampler[list[int]]):
    """One rank's batches of an epoch, each filled to a budget; the `batch_sampler` of a `DataLoader`.

    The rank's samples pass through a pool, in the epoch's order. A batch takes the pool's oldest sample, then
    every other sample that still fits, from old to new. So no sample waits for more than `pool` batches. A
    sample that costs more than the budget is a batch by itself. Ranks may have unequal numbers of batches.

    `state_dict` counts batches, which determine the pool if the number of ranks stays the same. It counts
    loaded batches, but workers and the stage run ahead of training: count trained batches, as below.
    docs/works-with.md shows the same for torchdata's `StatefulDataLoader`.

    Args:
        costs, tokens: cost and number of tokens of each sample of the data set, integers.
        pool: number of samples that a rank chooses from. A larger pool comes closer to the budget.
        budget: cost of a batch.
        max_tokens, max_rows: limits that a batch never exceeds.
    """

    def __init__(
        self,
        costs: np.ndarray,
        tokens: np.ndarray,
        pool: int,
        budget: int,
        max_tokens: int,
        max_rows: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        if len(tokens) and tokens.max() > max_tokens:
            raise ValueError(f"sample {tokens.argmax()} has {tokens.max()} tokens; max_tokens={max_tokens}")
        self.costs, self.tokens, self.pool = costs, tokens, pool
        self.budget, self.max_tokens, self.max_rows = budget, max_tokens, max_rows
        self.rank, self.num_ranks = rank, num_ranks
        self.epoch = self.start = self.taken = 0

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start, self.taken = self.start, 0, 0
        order = np.random.default_rng(self.epoch).permutation(len(self.costs))[self.rank :: self.num_ranks]
        pool, rest = order[: self.pool], order[self.pool :]
        while len(pool):
            chosen = self._fill(pool)
            batch = pool[chosen].tolist()
            pool = np.concatenate([np.delete(pool, chosen), rest[: len(chosen)]])
            rest = rest[len(chosen) :]
            self.taken += 1
            if self.taken > start:
                yield batch

    def _fill(self, pool: np.ndarray) -> list[int]:
        """Returns the places in the pool of a batch's samples, oldest first."""
        costs, tokens = self.costs[pool].tolist(), self.tokens[pool].tolist()
        cost, length, chosen = costs[0], tokens[0], [0]
        for place in range(1, len(pool)):
            if len(chosen) == self.max_rows:
                break
            fits = cost + costs[place] <= self.budget and length + tokens[place] <= self.max_tokens
            if fits:
                cost, length = cost + costs[place], length + tokens[place]
                chosen.append(place)
        return chosen

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.start = state["epoch"], state["batches"]


class Histories(Dataset[torch.Tensor]):
    """The items of each user. Whether an item was liked depends on the item before it."""

    def __init__(self, users: int = 700) -> None:
        self.lengths = np.random.default_rng(0).lognormal(2.5, 1.2, users).clip(2, LONGEST).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, user: int) -> torch.Tensor:
        drawn = np.random.default_rng((1, user))
        return torch.from_numpy(drawn.integers(ITEMS, size=self.lengths[user]))


def collate(rows: list[torch.Tensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict({"item": JaggedTensor.from_dense(rows)})


class LikeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.out = torch.nn.Embedding(ITEMS, 16), torch.nn.Linear(16, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, None]:
        items = batch["item"].values()
        states = self.items(items)
        attended = [states[:0]]  # a rank that has ended has no rows
        for history in states.split(batch["item"].lengths().tolist()):
            attended.append(
                functional.scaled_dot_product_attention(history, history, history, is_causal=True)
            )
        liked = (items.roll(1) < ITEMS // 3).float()
        scores = self.out(states + torch.cat(attended)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, liked, reduction="none"), None


class Attention(BatchShuffler):
    def get_workloads(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return batch["item"].lengths() ** 2 + 100 * batch["item"].lengths()

    def get_loss_tokens(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return batch["item"].lengths()


def make_sampler(data: Histories, rank: int, num_ranks: int) -> BudgetSampler:
    costs = data.lengths**2 + 100 * data.lengths
    budget = int(ROWS * costs.mean())
    return BudgetSampler(costs, data.lengths, 64, budget, 4 * LONGEST, 4 * ROWS, rank, num_ranks)


def train(steps: int, checkpoint: dict | None = None) -> tuple[torch.Tensor, dict]:
    torch.manual_seed(1)
    data, rank = Histories(), dist.get_rank()
    model = DistributedDataParallel(LikeModel())
    sampler, trained = make_sampler(data, rank, dist.get_world_size()), 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        sampler.load_state_dict(checkpoint["sampler"])
        trained = checkpoint["sampler"]["batches"]
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pipeline = TrainPipelineFactory.create(
        *("none", model, optimizer, torch.device("cpu")),
        batch_shuffler=Attention(enabled=False),  # no sample moves
        loss_reduction="sum",
    )
    batches, losses = iter(loader), []
    while len(losses) < steps:
        try:
            pipeline.progress(batches)
        except StopIteration:  # on all ranks in the same call
            break
        losses.append(pipeline.loss_sum / pipeline.loss_tokens)
        trained += 1
    pipeline.reset()  # drops the batches loaded ahead, which a resumed run loads again
    losses = torch.stack(losses) if losses else torch.zeros(0)
    dist.all_reduce(losses)
    return losses, {"model": model.state_dict(), "sampler": {"epoch": 0, "batches": trained}}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    show_first_cause_only()
    first, checkpoint = train(steps=10)
    rest, _ = train(steps=1000, checkpoint=checkpoint)
    for loss in torch.cat([first, rest]) if dist.get_rank() == 0 else ():
        print(f"loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
