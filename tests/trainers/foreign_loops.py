"""Loops and loaders of other libraries, with the stage: torchrun --nproc_per_node 2 foreign_loops.py NAME

Each trains on uneven histories, rank 0 with a batch fewer than rank 1, and compares with one process. NAME is
`accelerate`, `lightning` or `stateful_loader`, which take the package of that name, or torchdata.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from commons.distributed import BatchShuffler

BATCHES, RATE, LARGEST_NORM = (3, 4), 0.05, 0.3
Batch = dict[str, torch.Tensor]


class Loaded(Dataset):
    """A rank's batches."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return BATCHES[self.rank]

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.Generator().manual_seed(10 * self.rank + index)
        x, cost = torch.randn(4, 3, generator=drawn), torch.randint(1, 50, (4,), generator=drawn)
        return {"x": x, "cost": cost}

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


class Costs(BatchShuffler):
    def get_workloads(self, batch: Batch) -> torch.Tensor:
        return batch["cost"]


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.linear(batch["x"]).squeeze(1) ** 2


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


def check(model: Squares, epochs: int = 1) -> None:
    alone = Squares()
    optimizer = sgd(alone)
    for step in range(epochs * BATCHES[1]):
        index = step % BATCHES[1]
        batches = [Loaded(rank)[index]["x"] for rank in range(2) if index < BATCHES[rank]]
        optimizer.zero_grad()
        alone({"x": torch.cat(batches)}).mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), LARGEST_NORM)
        optimizer.step()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def accelerate() -> None:
    """The model and the optimizer are prepared, the loader is not: `plan_ahead` takes it as it is."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Squares()
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    shuffler = Costs()
    for batch, plan in shuffler.plan_ahead(Loaded(accelerator.process_index)):
        losses = prepared(shuffler.exchange(batch, plan))
        optimizer.zero_grad()
        accelerator.backward(shuffler.scale(losses, plan, "sum"))
        accelerator.clip_grad_norm_(prepared.parameters(), LARGEST_NORM)
        optimizer.step()
    check(model)


def lightning() -> None:
    """A loader gives planned batches, and `transfer_batch_to_device` exchanges them."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Squares()

        def setup(self, stage):
            self.shuffler = Costs()

        def train_dataloader(self):
            module = self

            class Planned:
                def __iter__(self):
                    return module.shuffler.plan_ahead(Loaded(dist.get_rank()))

            return Planned()

        def transfer_batch_to_device(self, planned, device, dataloader_idx):
            batch, plan = planned
            return self.shuffler.exchange({name: of.to(device) for name, of in batch.items()}, plan), plan

        def training_step(self, planned, index):
            batch, plan = planned
            return self.shuffler.scale(self.model(batch), plan, "sum")

        def configure_optimizers(self):
            return sgd(self)

    module, off = Module(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, gradient_clip_val=LARGEST_NORM, **off
    )
    trainer.fit(module)
    check(module.model, epochs=2)


def stateful_loader() -> None:
    """The state to save is that of the step's batch: the loader's own is ahead."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    dist.init_process_group("gloo")

    def made() -> StatefulDataLoader:
        return StatefulDataLoader(Loaded(dist.get_rank()), batch_size=None, num_workers=1)

    def trained(loader: StatefulDataLoader, steps: int | None = None) -> tuple[list[list[int]], list[dict]]:
        states, costs, shuffler = [], [], Costs()

        def with_states() -> Iterator[Batch]:
            for batch in loader:
                states.append(loader.state_dict())
                yield batch

        planned = shuffler.plan_ahead(with_states())
        with torch.no_grad():
            for batch, plan in planned:
                moved = shuffler.exchange(batch, plan)
                costs.append(moved["cost"][: plan.num_placed[dist.get_rank()]].tolist())
                if len(costs) == steps:
                    break
        planned.close()
        return costs, states

    whole, _ = trained(made())
    first, states = trained(made(), 2)
    resumed = made()
    resumed.load_state_dict(states[1])
    assert len(states) > 2 and first + trained(resumed)[0] == whole


if __name__ == "__main__":
    {"accelerate": accelerate, "lightning": lightning, "stateful_loader": stateful_loader}[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
