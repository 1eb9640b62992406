"""Runs a batch in micro-batches: tables are looked up once, gradients are reduced once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.types import ShardedModule

from ...distributed import BatchShuffler, ShufflePlan
from ...distributed.loss_reduction import check_reduction, loss_sum
from ...distributed.shuffle_plan import sum_loss_tokens
from ...named_ranges import named_range
from ...pipeline.shuffle_stage import losses_and_output
from ...sequence_batch.batch_view import BatchView, without_copied_row
from ...sequence_batch.packed_rows import to_device_together
from ...sharded_modules import outermost_sharded
from .divided_batch import micro_batch_rows, micro_batches, rows_of_micro_batches
from .looked_up import LookedUp


def run_micro_batches(
    model: torch.nn.Module,
    batch: Any,
    shuffler: BatchShuffler,
    plan: ShufflePlan,
    loss_reduction: str,
    loss_scale: float | torch.Tensor | None = None,
    failures: list[Exception] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Runs a model on a batch in micro-batches; in training also the backward of all but the tables.

    Sharded tables are looked up once, for the whole batch, and each micro-batch gets its part of the result,
    detached. The dense part then runs forward and backward for one micro-batch after another. So the
    activations of one at a time are in memory, along with the embeddings of the whole batch and their
    gradients. Data-parallel gradients are reduced in the last backward.

    Host-device synchronizations: one per sharded module, for the lengths of its parts, and those of the
    model, which runs once per micro-batch.

    Args:
        model: takes a batch, returns `(losses, output)`.
        batch: as exchanged, on the device.
        shuffler: the one that exchanged it.
        plan: the plan of that exchange, in micro-batches.
        loss_reduction: "sum" or "mean", over the loss tokens of a micro-batch.
        loss_scale: factor of the loss sum before its backward. None for the one that makes the gradient,
            averaged over ranks, that of the mean over all loss tokens of the plan.
        failures: as `loss_sum` takes it.

    Returns:
        A loss whose backward is that of the tables: in training call it, once. If it is multiplied by a
        factor before, so are all gradients of this call; as their backward has run, this keeps no float16
        gradient from vanishing. Where gradients accumulate over batches, give each the same factor. The sum
        of the losses, detached. The output of each micro-batch; without samples, what has one row in it has
        none.

    Raises:
        ValueError: "global_mean", or an unknown reduction.
        MeanOfNoneError: a "mean" of a micro-batch without loss tokens is not finite.
        RuntimeError: a sharded module is called with something that is not a field of the batch.
        TypeError: a sharded module returns a type whose rows are unknown here, or the model something other
            than losses and output.
    """
    check_reduction(loss_reduction)
    if loss_reduction == "global_mean":
        raise ValueError('"global_mean" is for a whole step: return a micro-batch\'s mean, and use "mean"')
    check_one_backward(model)
    device = shuffler.view(batch).device
    if loss_scale is None:
        loss_scale = shuffler.scale(torch.ones((), device=device), plan, "sum")
    parts, rows = micro_batches(shuffler, batch, plan), micro_batch_rows(shuffler, batch, plan)
    rank = shuffler.group.rank
    own = plan.rows.loss_tokens[plan.computed_by(rank)]
    samples = rows_of_micro_batches(plan, rank)
    loss_tokens = [sum_loss_tokens(own[part_rows]) for part_rows in samples]
    trains = model.training and torch.is_grad_enabled()
    replicated = _replicated(model) if trains else []
    dense = _DenseGradients(model if trains else None)
    lookups = _Lookups(model, batch, parts, rows, shuffler.view)
    total = torch.zeros((), device=device)
    outputs = []
    with lookups.in_place():
        for number, micro_batch in enumerate(parts):
            lookups.turn_to(number)
            is_last = number == len(parts) - 1
            with contextlib.ExitStack() as stack:
                for module in [] if is_last else replicated:
                    if not module.static_graph or module in _has_learnt_graph:
                        stack.enter_context(module.no_sync())
                losses, output = losses_and_output(model(micro_batch))
                loss = loss_sum(losses, loss_reduction, loss_tokens[number], 0.0, failures)
                if trains:
                    with named_range("## backward ##"):
                        (loss * loss_scale).backward()
                        lookups.collect_gradients()
                    _has_learnt_graph.update(replicated)
            total = total + loss.detach()
            is_copy = not (len(samples[number]) or shuffler.view(micro_batch).pads)
            outputs.append(without_copied_row(output) if is_copy and not model.training else output)
    scaled = total * loss_scale
    return (lookups.backward_from(scaled, dense) if trains else scaled), total, outputs


def check_one_backward(model: torch.nn.Module) -> None:
    """Raises a ValueError if something would happen in each backward that has to happen once per step."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"micro-batches run several backwards per step, and {name} has a hook after each, as of an "
                "optimizer that steps in backward: step after the last backward, or leave MicroBatches out"
            )


# With a static graph, DistributedDataParallel learns it in a first backward, which has to reduce gradients.
# Averaging them once more in the last one changes nothing.
_has_learnt_graph: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _check_no_checkpoint() -> None:
    """Raises a ValueError where activations are checkpointed around a lookup, which is not repeated."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks and hooks[0].__qualname__.startswith("_checkpoint_hook"):
        raise ValueError(
            "a checkpoint of activations around sharded tables cannot recompute micro-batches, for which "
            "they are looked up once: checkpoint the dense part alone, or leave MicroBatches out"
        )


def _replicated(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """Returns the modules whose gradients are averaged over ranks; sharded ones run once, and have none."""
    if isinstance(module, ShardedModule):
        return []
    found = [module] if isinstance(module, DistributedDataParallel) else []
    return list(dict.fromkeys(found + [inner for child in module.children() for inner in _replicated(child)]))


class _Lookups:
    """Lookups of a model's sharded modules for a batch, which its micro-batches share.

    Args:
        model, batch: as `run_micro_batches` takes them.
        micro_batches: of the batch.
        rows: int64, the rows of the batch in each micro-batch.
        view: returns the view of a batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        micro_batches: Sequence[Any],
        rows: Sequence[np.ndarray],
        view: Callable[[Any], BatchView],
    ) -> None:
        whole = view(batch).fields
        # The batch's field for each field of a micro-batch, which is kept, so that its id stays its own.
        self._whole_of = {
            id(value): (whole[name], value)
            for micro_batch in micro_batches
            for name, value in view(micro_batch).fields.items()
        }
        self._rows = to_device_together(rows, view(batch).device)
        self._modules = outermost_sharded(model)
        self._found: dict[tuple[int, int], LookedUp] = {}  # by module and how often it was called before
        self._calls = [0] * len(self._modules)
        self._number = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While active, the modules' forward returns a micro-batch's part."""
        replaced = [module.__dict__.get("forward") for module in self._modules]
        try:
            for index, module in enumerate(self._modules):
                module.forward = self._forward_of(index, module.forward)
            yield
        finally:
            for module, forward in zip(self._modules, replaced, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def turn_to(self, number: int) -> None:
        """Turns to another micro-batch."""
        self._number = number
        self._calls = [0] * len(self._modules)

    def collect_gradients(self) -> None:
        """Copies the gradients of the micro-batch's parts to their places."""
        for found in self._found.values():
            found.collect_gradients()

    def backward_from(self, loss: torch.Tensor, dense: _DenseGradients) -> torch.Tensor:
        """Returns `loss` with the backward of the lookups, which scales the dense gradients."""
        tensors, gradients = [], []
        for found in self._found.values():
            for tensor in found.tensors:
                if tensor.gradient is not None:
                    tensors.append(tensor.values)
                    gradients.append(tensor.gradient)
        return _BackwardOfTables.apply(loss.requires_grad_(), dense, gradients, *tensors)

    def _forward_of(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def part(*args: Any, **kwargs: Any) -> Any:
            key = index, self._calls[index]
            self._calls[index] += 1
            if key not in self._found:
                _check_no_checkpoint()
                whole = self._look_up(self._modules[index], forward, args, kwargs)
                self._found[key] = LookedUp(whole, self._rows)
            return self._found[key].part(self._number)

        return part

    def _look_up(
        self,
        module: ShardedModule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if isinstance(forward, BaseForward):  # its input was distributed before
            return forward(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if id(value) not in self._whole_of:
                raise RuntimeError(
                    f"{type(module).__name__} is called with a {type(value).__name__} that is no field of "
                    "the batch. To look tables up once for all micro-batches, the model has to call them on "
                    "a field of the batch, as in self.embeddings(batch.features)"
                )
        return forward(
            *(self._whole_of[id(value)][0] for value in args),
            **{name: self._whole_of[id(value)][0] for name, value in kwargs.items()},
        )


class _DenseGradients:
    """Gradients that the micro-batches' backwards leave in a model's parameters.

    What was accumulated before counts, and is reduced with them. In the meantime it is divided by the factor
    that is to come, which is most likely the last one: a gradient scaler's, of 65,536 say, under which new
    gradients would lose their last bits.

    Args:
        model: before the first micro-batch; None for no gradients.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        parameters = [] if model is None else list(model.parameters())
        self._before = [(each, None if each.grad is None else each.grad.clone()) for each in parameters]
        self._expected = 1.0 if model is None else _last_factor.get(model, 1.0)
        for parameter, before in self._before:
            if parameter.grad is not None and before is not None:
                parameter.grad.div_(self._expected)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies in place what the micro-batches have added; `factor` is 0-d."""
        if self._model is not None:
            divides = factor.isfinite() & (factor != 0)
            _last_factor[self._model] = torch.where(divides, factor, 1.0).detach()
        unexpected = 1 - factor / self._expected
        for parameter, before in self._before:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
                if before is not None:
                    parameter.grad.add_(before * unexpected)


_last_factor: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor | float] = weakref.WeakKeyDictionary()


class _BackwardOfTables(torch.autograd.Function):
    """Passes a loss through; its backward gives the tables' outputs the gradients from the micro-batches.

    These and the dense ones are those of the loss itself. They are multiplied by the gradient that comes in.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        dense: _DenseGradients,
        gradients: list[torch.Tensor],
        *values: torch.Tensor,
    ) -> torch.Tensor:
        ctx.dense, ctx.gradients = dense, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.dense.multiply(loss_gradient)
        return None, None, None, *(gradient.mul_(loss_gradient) for gradient in ctx.gradients)
