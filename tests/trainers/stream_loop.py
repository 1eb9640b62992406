"""A plain streaming loop whose batches move in place, as dlrm_v3's and MLPerf's.

"# balancing" marks the statements that switch the stage on, "# before:" the code they replace."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from workload_balancer.distributed import BatchShuffler  # balancing

from tests.trainers.clicks import Row, Scorer, draw, jagged, make_tables, mean_loss, shard  # noqa: F401


@dataclass
class Samples:
    history: KeyedJaggedTensor
    candidates: KeyedJaggedTensor
    labels: torch.Tensor
    merged: KeyedJaggedTensor  # both again, which MLPerf's loop never reads

    def to(self, device: torch.device) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))


def collate(rows: list[Row]) -> Samples:
    viewed, shown, clicked = map(list, zip(*rows, strict=True))
    history, candidates = jagged(viewed=viewed), jagged(shown=shown)
    merged = KeyedJaggedTensor.concat([history, candidates])
    return Samples(history, candidates, torch.tensor(clicked), merged)


class StreamModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.scorer = make_tables(), Scorer()

    def forward(
        self, history: KeyedJaggedTensor, candidates: KeyedJaggedTensor, labels: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scores = self.scorer(self.tables(KeyedJaggedTensor.concat([history, candidates])))
        return {"click": mean_loss(scores, labels)}, scores.detach()


class SamplesShuffler(BatchShuffler):  # balancing
    def get_workloads(self, samples: Samples) -> torch.Tensor:
        return samples.history.lengths() ** 2


def train(data: list[Row], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    model, optimizer = shard(StreamModel(), device)
    model.train()
    losses = []
    dataloader = DataLoader(data, batch_size=8, collate_fn=collate)
    shuffler = SamplesShuffler()  # balancing
    dataloader = shuffler.plan_ahead(dataloader)  # balancing
    for samples in dataloader:
        samples, plan = samples  # balancing
        optimizer.zero_grad()
        samples.to(device)
        samples = shuffler.exchange(samples, plan)  # balancing
        aux_losses, _ = model.forward(samples.history, samples.candidates, samples.labels)
        loss = sum(aux_losses.values())
        loss = shuffler.scale(loss, plan, "mean")  # balancing
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() / dist.get_world_size())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses, model
