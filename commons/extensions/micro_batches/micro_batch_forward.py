"""Runs a batch in micro-batches, but looks tables up only once, and reduces gradients only once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.types import ShardedModule

from ...distributed import BatchShuffler, ShufflePlan
from ...distributed.loss import check_reduction, loss_sum
from ...distributed.plan import sum_loss_tokens
from ...jagged_indices import to_device_together
from ...named_ranges import named_range
from ...pipeline.shuffle_stage import losses_and_output
from ...sequence_batch.rows import Rows
from ...sharded_modules import outermost_sharded
from .divided_batch import micro_batches, rows_of_micro_batches
from .looked_up import LookedUp, LookedUpTensor


def run_micro_batches(
    model: torch.nn.Module,
    batch: Any,
    shuffler: BatchShuffler,
    plan: ShufflePlan,
    loss_reduction: str,
    loss_scale: float | torch.Tensor | None = None,
    failures: list[Exception] | None = None,
    step_plans: Sequence[ShufflePlan] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Runs a model on a batch in micro-batches: forward, and in training also backward.

    Sharded tables are looked up once, for the whole batch, and each micro-batch gets its part of the result,
    detached. The dense part then runs forward and backward for one micro-batch after another. So memory holds
    the activations of one micro-batch at a time, along with the embeddings of the whole batch and their
    gradients. Data-parallel gradients are reduced in the backward of the returned loss.

    The host waits for the device once per sharded module, for the lengths of its parts. Waits of the model
    itself, which runs once per micro-batch, are additional.

    Provisional: may change in a minor version.

    Args:
        model: module that takes a batch and returns `(losses, output)`.
        batch: exchanged batch, on the device.
        shuffler: shuffler that exchanged the batch.
        plan: plan of that exchange, with micro-batches.
        loss_reduction: "sum" or "mean", over the loss tokens of a micro-batch.
        loss_scale: factor of the loss sum before its backward. None means the factor for which the gradient,
            averaged over ranks, is that of the mean over all loss tokens of the optimizer step.
        failures: list that receives failures, as in `loss_sum`.
        step_plans: plans of all batches of the optimizer step, for gradient accumulation. None means only
            this plan. If `loss_scale` is given, it must account for them itself.

    Returns:
        The scaled loss, the detached sum of losses, and a list of all micro-batch outputs. In training, call
        the loss's backward once, which hands out all gradients. Before that, you may multiply the loss or add
        other losses. A factor cannot save float16 gradients from vanishing, because the backward of the
        micro-batches has already run. An output has one row for a micro-batch without samples.

    Raises:
        ValueError: the reduction is "global_mean" or unknown; the plan has no micro-batches; or the model has
            a part that does not work with them, such as a hook on a gradient.
        MeanOfNoneError: the "mean" of a micro-batch without loss tokens is not finite.
        RuntimeError: a sharded module is called with a value that is not a field of the batch.
        TypeError: a sharded module's result cannot be divided, or the model's is not losses and output.
    """
    check_reduction(loss_reduction)
    if not plan.num_parts:
        raise ValueError("the plan has no micro-batches: give its shuffler extensions=[MicroBatches(...)]")
    if loss_reduction == "global_mean":
        raise ValueError('"global_mean" is for a whole step: return a micro-batch\'s mean, and use "mean"')
    if model.training:
        check_no_hooks(model, trains=True)
    device = shuffler.view(batch).device
    if loss_scale is None:
        loss_scale = shuffler.scale(torch.ones((), device=device), plan, "sum", step_plans=step_plans)
    parts, rows = micro_batches(shuffler, batch, plan)
    rank = shuffler.group.rank
    own = plan.rows.loss_tokens[plan.computed_by(rank)]
    loss_tokens = [sum_loss_tokens(own[samples]) for samples in rows_of_micro_batches(plan, rank)]
    trains = model.training and torch.is_grad_enabled()
    replicated = _replicated(model) if trains else []
    lookups = _Lookups(model, batch, parts, rows, shuffler.view)
    total, outputs = torch.zeros((), device=device), []
    with lookups.in_place(), _GradientsAside(model if trains else None) as dense, _no_reduction(replicated):
        for number, micro_batch in enumerate(parts):
            lookups.number = number
            losses, output = losses_and_output(model(micro_batch))
            loss = loss_sum(losses, loss_reduction, loss_tokens[number], 0.0, failures)
            if trains:
                with named_range("## backward ##"):
                    (loss * loss_scale).backward()
                    for looked_up in lookups.tensors():
                        looked_up.collect_gradient()
            total = total + loss.detach()
            outputs.append(output)
    scaled = total * loss_scale
    if trains:
        _check_static_graphs(model, replicated, dense)
        found = [of for of in lookups.tensors() if of.gradient is not None]
        gradients = [*(of.gradient for of in found), *dense.sums.values()]
        scaled = _HandOut.apply(scaled.requires_grad_(), gradients, *(of.values for of in found), *dense.sums)
        for module in replicated:
            # Announce one forward for all micro-batches, so that the module reduces in the coming backward.
            if any(parameter in dense.sums for parameter in module.parameters()):
                module._pre_forward(scaled)
                scaled = module._post_forward(scaled)
    return scaled, total, outputs


def check_no_hooks(model: torch.nn.Module, trains: bool = False) -> None:
    """Raises a ValueError if a hook would see the gradient of each micro-batch instead of their sum. In
    training, also refuses flat parameters, whose gradients are sharded by the time they are handed out."""
    for name, parameter in model.named_parameters():
        if trains and isinstance(parameter, FlatParameter) and parameter.requires_grad:
            raise ValueError(
                f"micro-batches do not work with {name} of FullyShardedDataParallel: give that "
                "use_orig_params=True, or use fully_shard"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"micro-batches run several backwards per step, and {name} has a hook on its gradient, as "
                "for clipping, or of an optimizer that steps in backward: do it after the backward, or leave "
                "MicroBatches out"
            )


def _check_static_graphs(
    model: torch.nn.Module, replicated: Sequence[DistributedDataParallel], dense: _GradientsAside
) -> None:
    """Raises a ValueError if a static graph has counted the backwards of micro-batches, because it would then
    reduce in a backward other than the last."""
    static = {id(of) for module in replicated if module.static_graph for of in module.parameters()}
    for name, parameter in model.named_parameters() if static else ():
        if id(parameter) in static and parameter in dense.reached_otherwise:
            raise ValueError(
                f"micro-batches do not work with static_graph=True of DistributedDataParallel if {name} "
                "is used other than as an attribute of its module, as in a list: leave static_graph out"
            )


@contextlib.contextmanager
def _no_reduction(replicated: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """While active, these modules reduce no gradients and learn no static graph."""
    delayed = "_static_graph_delay_allreduce_enqueued"
    with contextlib.ExitStack() as stack:
        for module in replicated:
            stack.enter_context(module.no_sync())
            if module.static_graph:
                stack.callback(setattr, module, delayed, getattr(module, delayed))
                setattr(module, delayed, True)
        yield


def _check_no_checkpoint() -> None:
    """Raises a ValueError if an activation checkpoint contains a lookup, because lookups run only once."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks and hooks[0].__qualname__.startswith("_checkpoint_hook"):
        raise ValueError(
            "a checkpoint of activations around sharded tables cannot recompute micro-batches, for which "
            "they are looked up once: checkpoint only the dense part, or leave MicroBatches out"
        )


def _replicated(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """Returns all DistributedDataParallel modules except those in sharded modules, which run only once."""
    if isinstance(module, ShardedModule):
        return []
    found = [module] if isinstance(module, DistributedDataParallel) else []
    return list(dict.fromkeys(found + [inner for child in module.children() for inner in _replicated(child)]))


class _Lookups:
    """The lookups of a model's sharded modules for a batch, which its micro-batches share.

    `rows` holds the rows of the batch in each micro-batch, int64. `view` is the shuffler's method. Set
    `number` to that of the micro-batch that runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        micro_batches: Sequence[Any],
        rows: Sequence[np.ndarray],
        view: Callable[[Any], Rows],
    ) -> None:
        whole = view(batch).fields
        # Maps the id of a micro-batch's field to the batch's field. The former is kept, so ids stay unique.
        self._whole_of = {
            id(value): (whole[name], value)
            for micro_batch in micro_batches
            for name, value in view(micro_batch).fields.items()
        }
        self._rows = to_device_together(rows, view(batch).device)
        self._modules = outermost_sharded(model)
        self._found: dict[tuple[ShardedModule, int], LookedUp] = {}  # by module, and number of earlier calls
        self._calls = Counter[tuple[ShardedModule, int]]()  # by module and micro-batch
        self.number = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While active, the forward of each sharded module returns the current micro-batch's part."""
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                if "forward" in vars(module):  # TorchRec's pipelines replace it, too
                    stack.callback(setattr, module, "forward", module.forward)
                else:
                    stack.callback(delattr, module, "forward")
                module.forward = self._forward_of(module, module.forward)
            yield

    def tensors(self) -> list[LookedUpTensor]:
        """Returns the looked-up tensors of the whole batch."""
        return [tensor for found in self._found.values() for tensor in found.tensors]

    def _forward_of(self, module: ShardedModule, forward: Callable[..., Any]) -> Callable[..., Any]:
        def part(*args: Any, **kwargs: Any) -> Any:
            key = module, self._calls[module, self.number]
            self._calls[module, self.number] += 1
            if key not in self._found:
                _check_no_checkpoint()
                if not isinstance(forward, BaseForward):  # whose input is distributed already
                    args = tuple(self._whole(value, module) for value in args)
                    kwargs = {name: self._whole(value, module) for name, value in kwargs.items()}
                self._found[key] = LookedUp(forward(*args, **kwargs), self._rows)
            return self._found[key].part(self.number)

        return part

    def _whole(self, value: Any, module: ShardedModule) -> Any:
        """Returns the batch's field for a micro-batch's field, so that a module looks up the whole batch."""
        if id(value) not in self._whole_of:
            raise RuntimeError(
                f"{type(module).__name__} is called with a {type(value).__name__} that is no field of "
                "the batch. Call it on one, as in self.embeddings(batch.features), to look tables up once"
            )
        return self._whole_of[id(value)][0]


class _GradientsAside:
    """Collects the gradients of micro-batches while active, apart from the model's earlier gradients.

    Modules meanwhile have substitute parameters in the same memory, for which DistributedDataParallel does
    not wait. Gradients that still reach the model's own parameters count, too, as for weights in a list,
    tables that the dense part reads, and fully sharded modules. Without a model, it collects none.

    Attributes:
        sums: gradient of each parameter that got one.
        reached_otherwise: parameters that got a gradient although modules had substitutes for them.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._parameters = [] if model is None else [*model.parameters()]
        self._places = [] if model is None else [*_dense_places(model)]
        self.sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.reached_otherwise: set[torch.nn.Parameter] = set()

    def __enter__(self) -> _GradientsAside:
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._leaves: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module, name, parameter in self._places:
            if parameter not in self._leaves:
                self._leaves[parameter] = torch.nn.Parameter(parameter.detach())
            module._parameters[name] = self._leaves[parameter]
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, parameter in self._places:
            module._parameters[name] = parameter
        self.reached_otherwise = {of for of in self._leaves if of.grad is not None}
        # All gradients are read before any is restored, because tables in one tensor share a gradient.
        for parameter in self._parameters:
            holders = (parameter, self._leaves.get(parameter))
            found = [each.grad for each in holders if each is not None and each.grad is not None]
            if found:
                self.sums[parameter] = found[0] if len(found) == 1 else found[0] + found[1]
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before
        self._before, self._leaves = [], {}


def _dense_places(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Yields (module, name, parameter) for each parameter that needs a gradient. Skips sharded modules, which
    run once, and fully sharded ones, which reduce gradients themselves."""
    if isinstance(module, ShardedModule | FSDPModule | FullyShardedDataParallel):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad:
            yield module, name, parameter
    for child in module.children():
        yield from _dense_places(child)


class _HandOut(torch.autograd.Function):
    """Passes a loss through. Its backward hands out the gradients of the micro-batches.

    These then reach tables and parameters like the gradients of a whole batch: multiplied by the incoming
    gradient, added once to those of other losses and batches, and reduced by DistributedDataParallel.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "the loss of micro-batches was backpropagated twice: add up losses before one backward"
            )
        return None, None, *(gradient.mul_(loss_gradient) for gradient in gradients)
