"""What TorchRec, PyTorch and Python bring along works with the stage as without it, or is refused."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    backward_injection,
    gradient_accumulation,
)
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler, empty_rank
from commons.distributed.empty_rank import check_runs_copies
from commons.extensions.micro_batches import MicroBatches
from commons.pipeline import ShuffleStageMixin
from tests.commons.histories import HistoryBatch, TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    RankingModel,
    pipeline_of,
    sharded,
    sharded_ranking_model,
    steps_of,
)
from tests.on_ranks import on_ranks
from tests.recorded_cuda.cases import DictShuffler, OfDicts


class Costs(BatchShuffler):
    def get_workloads(self, batch):
        return batch["cost"]

    get_tokens = get_workloads


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, batch):
        return self.linear(batch["x"]).squeeze(1) ** 2, None


def unless_refused(function: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a call returns, and the message of the error if all ranks refuse it."""
    result, message = None, ""
    try:
        result = function()
    except (TypeError, ValueError) as error:
        message = str(error)
    messages = [""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert all(messages) or not any(messages), f"only some ranks raised: {messages}"
    return result, message


def loaded_rows(rank: int) -> dict[str, torch.Tensor]:
    """Returns four rows of a rank, which need two micro-batches of ten tokens."""
    costs = torch.tensor([[9, 2, 3, 4], [9, 1, 1, 5]])
    return {"cost": costs[rank], "x": torch.arange(12.0).view(4, 3) / 7 + rank}


def drawn(steps: int) -> list[HistoryBatch]:
    rng = np.random.default_rng(dist.get_rank())
    return [histories(rng.integers(1, 9, 3), rng) for _ in range(steps)]


def losses_of(pipeline: Any, batches: Iterable[Any]) -> Iterator[float]:
    """Yields the loss of each step over all ranks."""
    for loss_sum, tokens, _ in steps_of(pipeline, batches):
        total = loss_sum.clone()
        dist.all_reduce(total)
        yield float(total) / tokens


class Named(torch.utils.data.Dataset):
    """Samples whose names are strings; rank 0 has the heavy ones."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = 4 * dist.get_rank() + index
        return {"name": f"user {number}", "number": number, "cost": [9, 8, 1, 1, 1, 1, 1, 1][number]}


@on_ranks(2)
def test_texts_that_the_default_collate_lists_follow_their_samples_or_are_refused():
    (batch,) = DataLoader(Named(), batch_size=4)
    assert isinstance(batch["name"], list) and len(batch["name"]) == len(batch["number"])
    placed, message = unless_refused(lambda: Costs().shuffle(batch))
    assert message or placed["name"] == [f"user {number}" for number in placed["number"].tolist()]


class Remembering(UserDict):
    """A mapping that computes a sum of each row once, as tokenizers' batches may."""

    @cached_property
    def totals(self) -> torch.Tensor:
        return self["x"].sum(1)


class TotalsShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.totals.long()


@on_ranks(2)
def test_cached_properties_of_an_exchanged_batch_are_those_of_its_own_rows_or_refused():
    x = torch.tensor([[[1.0, 1.0], [2.0, 2.0]], [[9.0, 9.0], [8.0, 8.0]]])[dist.get_rank()]
    shuffler = TotalsShuffler()

    def exchanged() -> list[Remembering]:
        batches = [Remembering(x=x.clone()), Remembering(x=x.flip(0))]
        with torch.no_grad():
            return [shuffler.exchange(*planned) for planned in shuffler.plan_ahead(batches)]

    placed, message = unless_refused(exchanged)
    assert message or len(placed) == 2
    for batch in placed or []:
        assert batch.totals.tolist() == batch["x"].sum(1).tolist(), batch.totals


class SparseRows(nn.Module):
    """Looks up a table whose gradient has only the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 2, sparse=True)

    def forward(self, batch):
        return (self.table(batch["id"]) ** 2).sum(1), None


@on_ranks(2)
def test_a_lazy_optimizer_leaves_rows_alone_that_no_sample_of_the_step_has():
    for wrapped in (False, True):
        _check_lazy_optimizer(wrapped)


def _check_lazy_optimizer(wrapped: bool) -> None:
    model = DistributedDataParallel(SparseRows())
    optimizer: Any = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    if wrapped:
        keyed = KeyedOptimizerWrapper(
            dict(model.named_parameters()), lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1)
        )
        optimizer = CombinedOptimizer([("tables", keyed)])
    pipeline = pipeline_of("none", model, optimizer, Costs())
    ids = [[[1, 2], [5]], [[3, 4]]][dist.get_rank()]  # rank 1 has no sample in the second step
    batches = [{"id": torch.tensor(of_step), "cost": torch.ones(len(of_step)).long()} for of_step in ids]

    def rows_changed_by_each_step() -> list[list[int]]:
        changed, before = [], model.module.table.weight.detach().clone()
        for _ in steps_of(pipeline, batches):
            after = model.module.table.weight.detach().clone()
            changed.append((after != before).any(1).nonzero().flatten().tolist())
            before = after
        return changed

    changed, message = unless_refused(rows_changed_by_each_step)
    assert message or changed == [[1, 2, 3, 4], [5]], changed


def stepped_in_backward(extensions: list[Any], num_steps: int = 2) -> list[torch.Tensor]:
    """Returns parameters of a fully sharded model whose optimizers step as soon as a gradient is there."""
    model = Squares()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipeline_of("none", model, idle, Costs(extensions=extensions))
    assert len(list(steps_of(pipeline, [loaded_rows(dist.get_rank())] * num_steps))) == num_steps
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@on_ranks(2)
def test_an_optimizer_that_steps_in_backward_takes_one_step_for_all_micro_batches_or_is_refused():
    whole = stepped_in_backward([])
    assert not torch.equal(whole[0], stepped_in_backward([], 0)[0])
    parts, message = unless_refused(lambda: stepped_in_backward([MicroBatches(10)]))
    if not message:
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_the_stage_in_front_of_an_evaluation_pipeline_works_or_names_one_that_does():
    class BalancedEvaluation(ShuffleStageMixin, EvalPipelineSparseDist):
        pass

    model, optimizer = sharded_ranking_model()
    model.eval()
    with torch.no_grad():
        expected = list(losses_of(pipeline_of("native", model, optimizer, TokenShuffler()), drawn(3)))

        def evaluated() -> list[float]:
            balanced = BalancedEvaluation(model, optimizer, CPU, TokenShuffler(), "sum")
            return list(losses_of(balanced, drawn(3)))

        losses, message = unless_refused(evaluated)
    if message:
        assert "TrainPipelineSparseDist" in message or '"native"' in message, message
    else:
        assert losses == pytest.approx(expected, rel=1e-5)


def losses_and_hook_calls(extensions: list[Any]) -> tuple[list[float], int]:
    """Trains with work that TorchRec injects into the backward of a sharded table."""
    pipeline = pipeline_of("native", *sharded_ranking_model(0.1), TokenShuffler(extensions=extensions))
    calls = []
    finder = backward_injection.OutputDistTensorFinder(sharding_type=ShardingType.ROW_WISE)
    activation = backward_injection.InjectionTargetType.ACTIVATION
    site = backward_injection.InjectionSite(fqn="tables", tensor_finder=finder, target_type=activation)
    pipeline.register_backward_hook(site, calls.append)
    losses = list(losses_of(pipeline, drawn(3)))
    return losses, len(calls)


@on_ranks(2)
def test_backward_hooks_of_a_pipeline_run_once_a_step_with_micro_batches_too_or_are_refused():
    losses, calls = losses_and_hook_calls([])
    assert calls == len(losses) == 3
    divided, message = unless_refused(lambda: losses_and_hook_calls([MicroBatches(12)]))
    if not message:
        assert divided[0] == pytest.approx(losses, rel=1e-5)
        assert divided[1] == calls


class Checkpointed(RankingModel):
    """Computes its forward again in the backward, lookups included."""

    def forward(self, batch):
        return checkpoint(super().forward, batch, use_reentrant=False)


@on_ranks(2)
def test_activation_checkpoints_around_lookups_train_alike_in_micro_batches_or_are_refused():
    def trained(extensions: list[Any]) -> list[float]:
        pipeline = pipeline_of("none", *sharded(Checkpointed(), 0.1), TokenShuffler(extensions=extensions))
        return list(losses_of(pipeline, drawn(3)))

    whole = trained([])
    parts, message = unless_refused(lambda: trained([MicroBatches(12)]))
    assert message or parts == pytest.approx(whole, rel=1e-5)


@on_ranks(2)
def test_evaluation_in_inference_mode_leaves_batches_that_train_afterwards():
    model, shuffler = DistributedDataParallel(Squares()), Costs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = loaded_rows(dist.get_rank())
    with torch.inference_mode():
        model.module(shuffler.shuffle(rows))
    one = {name: value[:1] for name, value in rows.items()}
    num_batches = 2 - dist.get_rank()  # rank 1 trains its second step without a sample
    gradients = []
    for batch, plan in shuffler.plan_ahead([one] * num_batches):
        losses, _ = model(shuffler.exchange(batch, plan))
        optimizer.zero_grad()
        shuffler.scale(losses, plan, "sum").backward()
        gradients.append(model.module.linear.bias.grad.clone())
    alone = Squares()
    for of_step, gradient in zip([[0, 1], [0]], gradients, strict=True):
        alone.zero_grad()
        x = torch.cat([loaded_rows(rank)["x"][:1] for rank in of_step])
        alone({"x": x})[0].mean().backward()
        torch.testing.assert_close(gradient, alone.linear.bias.grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_an_evaluation_pipeline_of_torchrec_between_steps_does_not_disturb_training():
    def trained(evaluate: bool) -> list[float]:
        model, optimizer = sharded_ranking_model(0.1)
        losses = []
        for loss in losses_of(pipeline_of("native", model, optimizer, TokenShuffler()), drawn(4)):
            losses.append(loss)
            if evaluate:
                evaluated(model.eval(), optimizer)
                model.train()
        return losses

    def evaluated(model: nn.Module, optimizer: Any) -> None:
        pipeline, loader, rows = EvalPipelineSparseDist(model, optimizer, CPU), iter(drawn(2)), []
        with torch.no_grad():
            for _ in range(2):
                rows.append(len(pipeline.progress(loader).lengths()))
            with pytest.raises(StopIteration):
                pipeline.progress(loader)
        assert rows == [3, 3]

    assert trained(True) == pytest.approx(trained(False), rel=1e-6)


def outputs_of(pipeline: Any, loader: Iterator[Any]) -> Iterator[Any]:
    """Yields what a pipeline returns until its loader ends."""
    while True:
        try:
            yield pipeline.progress(loader)
        except StopIteration:
            return


@on_ranks(2)
def test_one_evaluation_pipeline_of_torchrec_sees_all_batches_after_each_reset():
    model, optimizer = sharded_ranking_model(0.1)
    evaluation, rows = EvalPipelineSparseDist(model, optimizer, CPU), []
    for _ in losses_of(pipeline_of("native", model, optimizer, TokenShuffler()), drawn(3)):
        model.eval()
        with torch.no_grad():
            rows.append([len(output.lengths()) for output in outputs_of(evaluation, iter(drawn(2)))])
        evaluation.reset()
        model.train()
    assert rows == [[3, 3]] * 3


@pytest.mark.parametrize("cap", [None, 10])
@on_ranks(2)
def test_gradient_accumulation_of_torchrec_adds_up_the_gradients_of_balanced_steps(cap):
    model = DistributedDataParallel(Squares())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shuffler = Costs(extensions=[] if cap is None else [MicroBatches(cap)])
    pipeline = pipeline_of("none", model, optimizer, shuffler)
    config = gradient_accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=2)
    accumulating = gradient_accumulation.GradientAccumulationWrapper(pipeline, optimizer, model, config)
    loader = iter([loaded_rows(dist.get_rank())] * 4)
    for _ in range(4):
        accumulating.progress(loader)
    with pytest.raises(StopIteration):
        accumulating.progress(loader)

    alone = Squares()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    x = torch.cat([loaded_rows(rank)["x"] for rank in range(2)])
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            alone({"x": x})[0].mean().backward()
        optimizer.step()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class Renumbered(nn.Module):
    """Changes ids before they are looked up, for TorchRec to pipeline by `pipeline_postproc`."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(features.keys(), features.values() // 2, lengths=features.lengths())


class WithPostproc(RankingModel):
    def __init__(self) -> None:
        super().__init__()
        self.renumbered = Renumbered()

    def forward(self, batch: HistoryBatch) -> Any:
        return self.dense(self.tables(self.renumbered(batch.features)), batch)


@on_ranks(2)
def test_modules_that_torchrec_runs_on_whole_batches_are_refused_with_micro_batches():
    def pipeline(extensions: list[Any]) -> Any:
        shuffler = TokenShuffler(extensions=extensions)
        return pipeline_of("native", *sharded(WithPostproc()), shuffler, pipeline_postproc=True)

    pipeline([]).progress(iter([histories([1, 2])]))
    with pytest.raises(RuntimeError, match="whole batch before micro_batches divides it"):
        pipeline([MicroBatches(40)]).progress(iter([histories([1, 2])]))


@pytest.mark.parametrize("keeps_names", [True, False])
@on_ranks(2)
def test_flat_parameters_are_refused_with_micro_batches(keeps_names):
    model = FullyShardedDataParallel(Squares(), use_orig_params=keeps_names, device_id=CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.rand(4, 3), "cost": torch.arange(1, 5)}
    refused = pytest.raises(ValueError, match="use_orig_params=True, or use fully_shard")
    with nullcontext() if keeps_names else refused:
        pipeline = pipeline_of("none", model, optimizer, Costs(extensions=[MicroBatches(5)]))
        pipeline.progress(iter([batch]))


class Listed(Squares):
    """Uses its weights from a list."""

    def forward(self, batch):
        weight, bias = [self.linear.weight, self.linear.bias] if self._anew else self._weights
        return nn.functional.linear(batch["x"], weight, bias).squeeze(1) ** 2, None

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self._anew, self._weights = anew, [self.linear.weight, self.linear.bias]


@pytest.mark.parametrize("anew", [True, False])
@on_ranks(2)
def test_a_static_graph_is_refused_where_it_would_count_backwards_of_micro_batches(anew):
    model = DistributedDataParallel(Listed(anew), static_graph=True)
    pipeline = pipeline_of(
        "none", model, torch.optim.SGD(model.parameters(), 0.1), Costs(extensions=[MicroBatches(5)])
    )
    batches = iter([{"x": torch.rand(4, 3), "cost": torch.arange(1, 5)}] * 3)
    with nullcontext() if anew else pytest.raises(ValueError, match="static_graph=True of Distributed"):
        for _ in range(3):
            pipeline.progress(batches)


@pytest.mark.parametrize("kind", ["ADAM", "EXACT_ROWWISE_ADAGRAD"])
def test_a_copied_row_is_refused_where_a_fused_optimizer_would_move_it(kind):
    tables = nn.Module()
    tables.optimizer = EmbOptimType[kind]  # as FBGEMM's tables have it, those for Adam on GPUs alone
    check = partial(check_runs_copies, np.array([2, 0]), False, "sum", nn.Sequential(tables))
    if kind == "ADAM":
        with pytest.raises(
            ValueError, match="whose rows the tables' ADAM changes even with a gradient of zero"
        ):
            check()
    else:
        check()


@on_ranks(2)
def test_a_copied_row_is_refused_in_tables_that_torchrec_has_sharded():
    model, _ = sharded_ranking_model()
    check = partial(check_runs_copies, np.array([2, 0]), False, "sum", model)
    check()
    theirs = mock.patch.object(empty_rank, "_MOVING", ("EXACT_SGD",))  # tables with Adam are for GPUs
    with theirs, pytest.raises(ValueError, match="whose rows the tables' EXACT_SGD changes"):
        check()


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_an_evaluation_on_copied_rows_moves_none_of_them(name):
    model, optimizer = sharded(OfDicts())
    pipeline = pipeline_of(name, model, optimizer, DictShuffler())
    batches = [histories([1 + step] * 3) for step in range(1 if dist.get_rank() else 3)]
    model.eval()
    with mock.patch.object(empty_rank, "_MOVING", ("EXACT_SGD",)), torch.no_grad():
        loader = iter([{"features": batch.features, "weight": torch.ones(3)} for batch in batches])
        assert len([*steps_of(pipeline, loader)]) == 3


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_a_model_that_raises_stop_iteration_does_not_end_the_epoch(name):
    model, optimizer = sharded_ranking_model()
    model.module.dense.forward = lambda *_: next(iter(()))
    with pytest.raises(RuntimeError, match=r"the model, or an extension, raised StopIteration\(\) in a step"):
        pipeline_of(name, model, optimizer, TokenShuffler()).progress(iter([histories([1, 2])] * 3))


@pytest.mark.parametrize("mode", ["NONE", "L2", "DECOUPLE"])
def test_a_copied_row_is_refused_where_weight_decay_would_move_it(mode):
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=[0, 0],  # on CPUs, tables of one feature have no decay
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weight_decay=0.5,
        weight_decay_mode=WeightDecayMode[mode],
    )
    tables.split_embedding_weights()[0].fill_(1.0)
    (0 * tables(torch.arange(2), torch.arange(3))).sum().backward()
    moves = bool((tables.split_embedding_weights()[0] != 1.0).any())
    assert moves == (mode != "NONE")  # for a gradient of zero
    model = nn.Sequential(tables)
    model._lookups = [7, "a name"]  # a user's own
    check = partial(check_runs_copies, np.array([2, 0]), False, "sum", model)
    with pytest.raises(ValueError, match="the tables' weight decay changes") if moves else nullcontext():
        check()


@pytest.mark.parametrize("kind", ["list", "dict", "pairs", "method", "sharded"])
@on_ranks(1)
def test_a_sparse_adam_is_found_in_every_container_of_optimizers(kind):
    parameters = [nn.Parameter(torch.zeros(2))]
    sgd, adam = torch.optim.SGD(parameters, lr=0.1), torch.optim.SparseAdam(parameters, lr=0.1)
    held = {"list": [sgd, adam], "dict": {"a": sgd, "b": adam}, "pairs": [("a", sgd), ("b", adam)]}
    container: Any = SimpleNamespace(optimizers=held.get(kind, lambda: [sgd, adam]))
    container.optimizer = container  # as of a wrapper that knows itself
    if kind == "sharded":
        container = ZeroRedundancyOptimizer(parameters, torch.optim.SparseAdam, lr=0.1)
    check = partial(check_runs_copies, np.array([2, 0]), False, "sum", None, container)
    if kind == "method":
        check()
    else:
        with pytest.raises(ValueError, match="whose rows SparseAdam changes"):
            check()
