"""Ways to run the stage, each on the CPU and on a recorded GPU, with equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import commons.extensions.more_kinds  # noqa: F401  for its effect
from commons.distributed import BatchShuffler, BatchShufflerFactory, IdentityShuffler
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches, run_micro_batches
from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from tests.commons.distributed.container_batches import KINDS, MORE_KINDS, ContainerShuffler, make_batch
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    OF_TORCHREC,
    OTHERS,
    WIDTH,
    RankingModel,
    on_cpus,
    outputs_of,
    sharded,
    sharded_ranking_model,
    steps_of,
)
from tests.commons.sequence_batch.internals import Rows
from tests.commons.training.internals import StepVote
from tests.commons.unbounded_ids.sharded_tables import Summed
from tests.docs.pages import blocks
from tests.gradient_comparison import local_tensors
from tests.gradient_models import CASES as MODELS

from . import modes

ROWS = 4
GIVEN = {"semi_sync": {"start_batch": 2}}  # it trains synchronously before
Results = list[Any]


class Place:
    """Where a case runs: on the CPU, or on the recorded GPU."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.device = modes.CUDA if on_cuda else CPU

    def adopt(self, model: torch.nn.Module) -> torch.nn.Module:
        """Puts a model there."""
        return modes.adopt(model) if self.on_cuda else model

    def load(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields batches as a loader for the device does: in pinned memory."""
        for batch in batches:
            if self.on_cuda:
                shared = {"unit"} & batch.keys() if isinstance(batch, dict) else ()
                batch = (
                    Rows(batch, shared).pin_memory().batch if isinstance(batch, dict) else batch.pin_memory()
                )
            yield batch

    def training(
        self, shuffler: BatchShuffler | None = None, kind: str = "native", made: Any = None
    ) -> tuple[Any, torch.nn.Module]:
        """Makes a pipeline of a model there. `made` is a model with its optimizer, or the ranking model's.

        "prefetch" runs on the recorded GPU alone, and gets tables planned for a cache. There is none: the
        kernels are those of the CPU, which have nothing to fetch.
        """
        model, optimizer = made or sharded_ranking_model()
        self.adopt(model)
        kind = "native" if kind == "prefetch" and not self.on_cuda else kind
        for module in model.modules() if kind == "prefetch" else ():
            for sharding in getattr(module, "module_sharding_plan", {}).values():
                sharding.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        pipeline = TrainPipelineFactory.create(
            kind,
            model=model,
            optimizer=optimizer,
            device=self.device,
            batch_shuffler=shuffler or TokenShuffler(),
            loss_reduction="sum",
            **GIVEN.get(kind, {}),
        )
        return pipeline if self.on_cuda else on_cpus(pipeline), model


def histories(count: int, seed: int = 0) -> list[Any]:
    """Draws batches of this rank."""
    return [
        draw_histories(np.random.default_rng((seed, dist.get_rank(), each)), ROWS) for each in range(count)
    ]


def steps(pipeline: Any, loader: Iterator[Any], count: int | None = None) -> Results:
    """Runs steps, all that there are if no number is given; returns their losses, tokens and outputs."""
    return list(islice(steps_of(pipeline, loader), count))


def parameters(model: torch.nn.Module) -> Results:
    """Returns a model's parameters, those of its tables too."""
    return list(local_tensors(model).values())


class LabelsFirst(RankingModel):
    """Reads labels before it looks tables up, so that a lookup's wait does not cover them."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        labels = batch.labels.values().float()
        losses, output = self.dense(self.tables(batch.features), batch)
        return losses + 0 * labels, output


def native(place: Place, extensions: Sequence[Any] = (), kind: str = "native", **settings: Any) -> Results:
    """The loader of rank 1 ends early."""
    shuffler = TokenShuffler(extensions=list(extensions), **settings)
    pipeline, model = place.training(shuffler, kind, sharded(LabelsFirst()))
    results = steps(pipeline, place.load(histories(2 if dist.get_rank() else 4)))
    return [results, steps(pipeline, place.load(histories(2, seed=1))), parameters(model)]


class OfDicts(torch.nn.Module):
    """Takes dicts, which are no `BaseBatch`."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.scale = RankingModel().tables, torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.squares(self.tables(batch["features"]), batch["weight"] * batch["unit"])

    def squares(self, found: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = (found["item"].values() * self.scale).square().sum()
        return squares * weight.sum(), weight.clone()  # not the batch's, which would live on


class OfTorchRecBatches(OfDicts):
    """Takes TorchRec's own batches."""

    def forward(self, batch: TorchRecBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.squares(self.tables(batch.sparse_features), batch.labels)


class SquaresShuffler(BatchShuffler):
    """The workload is the square of the ids, of a dict or of TorchRec's batch."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        features = batch["features"] if isinstance(batch, dict) else batch.sparse_features
        return features.lengths().view(3, -1).sum(0) ** 2


class DictShuffler(SquaresShuffler):
    shared_fields = ("unit",)


def of_containers(place: Place, of_torchrec: bool = False, kind: str = "native") -> Results:
    """Batches are dicts of two tensors and a shared one, or TorchRec's, which records its tensors itself."""
    make_model = OfTorchRecBatches if of_torchrec else OfDicts
    shuffler = SquaresShuffler() if of_torchrec else DictShuffler()
    pipeline, model = place.training(shuffler, kind, sharded(make_model()))
    weight = torch.arange(1.0, 1 + ROWS)
    batches = (
        TorchRecBatch(torch.ones(ROWS, 1), batch.features, weight.clone())
        if of_torchrec
        else {"features": batch.features, "weight": weight.clone(), "unit": torch.ones(1)}
        for batch in histories(4)
    )
    return [steps(pipeline, place.load(batches)), parameters(model)]


def unbounded(place: Place) -> Results:
    """A table of unbounded ids, whose rows follow the ids that are seen."""
    model, optimizer = shard_model(Summed(8, "lru"), OptimizerArgs("adagrad", 0.1), CPU)
    place.adopt(model)
    results: Results = []
    for step in range(3):
        ids = torch.arange(4) * 7 + 100 * step + dist.get_rank()
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([4, 0], dtype=torch.int32))
        if place.on_cuda:
            features = features.pin_memory()
        loss, found = model(features.to(place.device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(found)
    return [results, parameters(model)]


def evaluated(place: Place, kind: str = "native") -> Results:
    """A second pipeline evaluates the model in the middle of an epoch, whose last batches are dropped."""
    made = sharded_ranking_model()
    (training, model), (evaluation, _) = (place.training(None, kind, made) for _ in range(2))
    loader, results = place.load(histories(6)), []
    for seed in (1, 2):
        results += steps(training, loader, 2)
        model.eval()
        with torch.no_grad():
            results += steps(evaluation, place.load(histories(2, seed)))
        model.train()
    training.reset()
    return [results, steps(training, place.load(histories(2, seed=3))), parameters(model)]


class Failing:
    """A loader that fails at some batches of rank 1, and goes on with the next."""

    def __init__(self, batches: Iterator[Any], numbers: set[int]) -> None:
        self._batches, self._numbers = enumerate(batches), numbers

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> Any:
        number, batch = next(self._batches)
        if number in self._numbers and dist.get_rank() == 1:
            raise OSError(f"file {number} cannot be read")
        return batch


def failing(place: Place, kind: str = "native") -> Results:
    """Loaders fail, and the pipeline goes on."""
    results, errors = [], []
    pipeline, model = place.training(kind=kind)
    for seed, numbers in enumerate([{0, 1, 4}, {3, 5}]):
        loader = Failing(place.load(histories(6, seed)), numbers)
        ended = False
        while not ended:
            try:
                results.append((pipeline.progress(loader), pipeline.loss_sum))
            except OSError as error:
                errors.append(str(error))
            except StopIteration:
                ended = True
    return [results, errors, parameters(model)]


def own_loop(place: Place) -> Results:
    """Copy and exchange run on a stream of their own, one batch ahead, as `own-loop.md` has it."""
    model, optimizer = sharded_ranking_model()
    place.adopt(model)
    unshuffle, micro_batches = Unshuffle(), MicroBatches(40)
    shuffler = TokenShuffler(extensions=[unshuffle, micro_batches])
    stream = torch.cuda.Stream() if place.on_cuda else None
    results: Results = []
    for batch, plan in shuffler.plan_ahead(place.load(histories(3))):
        with modes.DEVICE.on(stream):
            batch = shuffler.exchange(batch.to(place.device, non_blocking=True), plan)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
            batch.record_stream(torch.cuda.current_stream())
        optimizer.zero_grad()
        loss, _, outputs = run_micro_batches(model, batch, shuffler, plan, "sum")
        loss.backward()
        optimizer.step()
        results.append(unshuffle.unshuffle(micro_batches.join_values(outputs, plan), plan))
    return [results, parameters(model)]


def of_model(place: Place, name: str, extensions: Sequence[Any] = (), kind: str = "native") -> Results:
    """A model of HSTU or SID-GR in a pipeline."""
    case, rank = MODELS[name], dist.get_rank()
    settings = {**case.shuffler, "equal_rows": False, "extensions": list(extensions)}
    pipeline, model = place.training(
        BatchShufflerFactory.create_from_config(settings),
        kind,
        shard_model(case.make_model(), OptimizerArgs("sgd", 0.01), CPU),
    )
    batches = [case.make_batch(case.samples(rank + 10 * number, 4)) for number in range(4)]
    losses = [loss for loss, *_ in steps(pipeline, place.load(batches))]
    return [losses, parameters(model)]


def forward_of(place: Place, name: str, is_exchanged: bool = True) -> Results:
    """Forward and backward of a model alone, on a batch of this rank; its plan has what the host needs."""
    case, shuffler = MODELS[name], IdentityShuffler()
    model, batch = place.adopt(case.make_model()), case.make_batch(case.samples(0, 4))
    plan = shuffler.plan(batch)
    (batch,) = place.load([batch])
    batch = batch.to(place.device, non_blocking=True)
    loss, _ = model(shuffler.exchange(batch, plan) if is_exchanged else batch)
    return [loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def learned(place: Place) -> Results:
    """Costs are learned from the times of a clock; each time is the same here."""
    pipeline, _ = place.training(TokenShuffler(extensions=[LearnedCosts()], equal_rows=False))
    losses = [loss for loss, *_ in steps(pipeline, place.load(histories(21)))]
    return [len(losses), pipeline.plan.predicted_seconds is not None]


def trained(place: Place) -> Results:
    """As in the trainer, a vote travels with each plan."""
    vote = StepVote()
    pipeline, model = place.training(TokenShuffler(extensions=[vote]))
    loader = place.load(histories(6))
    stops = [vote.after_step(step, loss) for step, (loss, *_) in enumerate(steps_of(pipeline, loader), 1)]
    vote.finish()
    return [stops, parameters(model)]


def kinds_of_fields(place: Place) -> Results:
    """Dicts, TorchRec's batches and TensorDicts, with fields of every kind, over both exchanges."""
    results: Results = []
    for kind in (*KINDS, *MORE_KINDS):
        for exchange in ("all_to_all", "all_gather"):
            shuffler = ContainerShuffler(exchange=exchange)
            for seed in range(2):
                batch = make_batch(kind, seed, 100 * dist.get_rank(), 3 + 2 * dist.get_rank())
                plan = shuffler.plan(batch)
                if place.on_cuda:
                    batch = Rows(batch).pin_memory().to(place.device, non_blocking=True).batch
                results.append(shuffler.view(shuffler.exchange(batch, plan)).fields)
    return results


def of_torchrec_alone(place: Place, kind: str) -> Results:
    """TorchRec's own pipeline, without the stage, which shows the races that it has itself.

    Fused: nothing orders a lookup, on the stream of the input distribution, after the tables' last update on
    the default stream. What it finds is freed without being recorded there. Semi-synchronous: nothing orders
    a lookup, on the default stream, after the end of its input distribution, on another.
    """
    results: Results = []
    case, rank = MODELS["ranking"], dist.get_rank()
    of_hstu = [case.make_batch(case.samples(rank + 10 * number, 4)) for number in range(4)]
    of_model = shard_model(case.make_model(), OptimizerArgs("sgd", 0.01), CPU)
    for (model, optimizer), batches in ((sharded(LabelsFirst()), histories(4)), (of_model, of_hstu)):
        base = getattr(train_pipelines, OF_TORCHREC[kind])
        forward = partial(_summed, place.adopt(model))
        pipeline = base(model, optimizer, place.device, custom_model_fwd=forward, **GIVEN.get(kind, {}))
        pipeline = pipeline if place.on_cuda else on_cpus(pipeline)
        for _ in range(2):
            results += outputs_of(pipeline, place.load(batches))
        results += parameters(model)
    return results


def _summed(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, _ = model(batch)
    return losses.sum(), losses.detach()


def of_kind(kind: str) -> dict[str, Callable[[Place], Results]]:
    """Returns the cases of one of TorchRec's other pipelines."""
    return {
        f"{kind}, TorchRec alone": partial(of_torchrec_alone, kind=kind),
        kind: partial(native, kind=kind),
        f"{kind}, evaluation": partial(evaluated, kind=kind),
        f"{kind}, failing loaders": partial(failing, kind=kind),
        f"{kind}, dicts": partial(of_containers, kind=kind),
        f"{kind}, micro-batches": lambda place: of_model(place, "ranking", [MicroBatches(40)], kind),
        f"{kind}, pieces": lambda place: of_model(place, "ranking", [DrawnCuts(0)], kind),
    }


def staged(place: Place) -> Results:
    """TorchRec's staged pipeline as `own-loop.md` has it, which learns what "native" does."""
    if not place.on_cuda:
        pipeline, model = place.training()
        steps(pipeline, place.load(histories(4 - dist.get_rank())))
        return parameters(model)
    model, optimizer = sharded_ranking_model()
    (recipe,) = (block for block in blocks("python") if "StagedTrainPipeline" in block.code)
    names: dict[str, Any] = {"torch": torch, "BatchShuffler": BatchShuffler}
    exec(recipe.code, names)
    loader = place.load(histories(4 - dist.get_rank()))
    names["train_staged"](place.adopt(model), optimizer, TokenShuffler(), loader, place.device)
    return parameters(model)


CASES: dict[str, Callable[[Place], Results]] = {
    "native": native,
    "native, all-gather": partial(native, exchange="all_gather"),
    "native, off": partial(native, enabled=False),
    "native among some": lambda place: native(
        place, process_group=dist.new_subgroups_by_enumeration([[0], [1]])[0]
    ),
    "prefetch": partial(native, kind="prefetch"),
    "evaluation": evaluated,
    "prefetch, evaluation": partial(evaluated, kind="prefetch"),
    "failing loaders": failing,
    "prefetch, failing loaders": partial(failing, kind="prefetch"),
    "dicts": of_containers,
    "prefetch, dicts": partial(of_containers, kind="prefetch"),
    "TorchRec's batches": partial(of_containers, of_torchrec=True),
    **{name: case for kind in OTHERS for name, case in of_kind(kind).items()},
    "unbounded ids": unbounded,
    "own loop": own_loop,
    "own loop, staged": staged,
    "micro-batches": lambda place: of_model(place, "ranking", [MicroBatches(40)]),
    "prefetch, micro-batches": lambda place: of_model(place, "ranking", [MicroBatches(40)], "prefetch"),
    "pieces": lambda place: of_model(place, "ranking", [DrawnCuts(0)]),
    "prefetch, pieces": lambda place: of_model(place, "ranking", [DrawnCuts(0)], "prefetch"),
    "pieces of SID-GR": lambda place: of_model(place, "sid_gr, all items", [DrawnCuts(0)], "none"),
    **{f"forward of {name}": partial(forward_of, name=name) for name in MODELS},
    "forward of a batch as loaded": partial(forward_of, name="ranking", is_exchanged=False),
    "verification": lambda place: native(place, [Verification()]),
    "learned costs": learned,
    "votes": trained,
    "fields": kinds_of_fields,
}
