"""Accumulates gradients in its own loop: torchrun --nproc_per_node 2 examples/gradient_accumulation.py

"# balancing" marks the statements that switch the stage on. "# before:" marks the code they replace."""

import contextlib
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import JaggedTensor
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.first_cause import show_first_cause_only  # balancing

ACCUMULATED = 2  # batches per optimizer step


class Sessions(NamedTuple):
    viewed: JaggedTensor  # items
    shown: JaggedTensor  # ads
    clicked: JaggedTensor  # whether each ad was clicked


def draw(shard: int, row: int) -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(1_000_003 * shard + row)
    viewed = int(torch.empty(()).log_normal_(3, 1.2, generator=drawn).clamp(1, 200))
    shown = torch.randint(100, (int(torch.randint(5, (), generator=drawn)),), generator=drawn)
    return torch.randint(500, (viewed,), generator=drawn), shown, (shown < 30).float()


def collate(rows: list[tuple[torch.Tensor, ...]]) -> Sessions:
    return Sessions(*(JaggedTensor.from_dense(list(column)) for column in zip(*rows, strict=True)))


class AdModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.ads = torch.nn.Embedding(500, 16), torch.nn.Embedding(100, 16)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, sessions: Sessions) -> torch.Tensor:
        scores = []
        for viewed, shown in zip(sessions.viewed.to_dense(), sessions.shown.to_dense(), strict=True):
            history = self.items(viewed)
            interest = functional.scaled_dot_product_attention(history, history, history).mean(0)
            scores.append(self.ads(shown) @ self.out(interest))
        return functional.binary_cross_entropy_with_logits(torch.cat(scores), sessions.clicked.values())


class SessionShuffler(BatchShuffler):  # balancing
    def get_workloads(self, sessions: Sessions) -> torch.Tensor:
        return sessions.viewed.lengths() ** 2  # attention

    def get_loss_tokens(self, sessions: Sessions) -> torch.Tensor:
        return sessions.shown.lengths()


def train(data: list[tuple[torch.Tensor, ...]], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    torch.manual_seed(1)
    model = DistributedDataParallel(AdModel().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    shuffler = SessionShuffler()  # balancing
    batches = shuffler.plan_ahead(batches)  # balancing
    while step := list(itertools.islice(batches, ACCUMULATED)):
        step, plans = zip(*step, strict=True)  # balancing
        losses.append(torch.zeros((), device=device))
        optimizer.zero_grad()
        for number, sessions in enumerate(step):
            sessions = Sessions(*(jagged.to(device) for jagged in sessions))
            sessions = shuffler.exchange(sessions, plans[number])  # balancing
            with contextlib.nullcontext() if number == len(step) - 1 else model.no_sync():
                loss = model(sessions)
                # before: loss = loss / len(step)
                loss = shuffler.scale(loss, plans[number], "mean", step_plans=plans)  # balancing
                loss.backward()
            losses[-1] += loss.detach() / dist.get_world_size()
        optimizer.step()
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses, model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    show_first_cause_only()  # balancing
    rank = dist.get_rank()
    losses, _ = train([draw(rank, row) for row in range(317 - 3 * rank)], torch.device("cpu"))
    for loss in losses if rank == 0 else ():
        print(f"loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
