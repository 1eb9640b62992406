"""A model and a loader for the Python blocks of the page about your own loop."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec import JaggedTensor

_Batch = dict[str, JaggedTensor | torch.Tensor]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 1)

    def forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = [self.table(items).sum(0) for items in batch["items"].to_dense()]
        scores = self.out(torch.stack(pooled)).squeeze(1)
        return (scores - batch["labels"]).square().mean(), scores


def load_batch(rows: int = 6) -> _Batch:
    lengths = torch.randint(1, 30, (rows,))
    items = JaggedTensor(torch.randint(100, (int(lengths.sum()),)), lengths=lengths)
    return {"items": items, "labels": torch.rand(rows)}


device = torch.device("cpu")
torch.manual_seed(0)
model = DistributedDataParallel(_Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
