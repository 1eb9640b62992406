"""A pipeline and its batches for the Python block of the page about watching a run."""

from commons.distributed import IdentityShuffler
from commons.pipeline import TrainPipelineFactory
from tests.docs.preludes.readme import _batch, device, model, optimizer

pipeline = TrainPipelineFactory.create(
    "native",
    model=model,
    optimizer=optimizer,
    device=device,
    batch_shuffler=IdentityShuffler(),
    loss_reduction="sum",
)
batches = iter([_batch() for _ in range(4)])
num_steps = 4
