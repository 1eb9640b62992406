"""Scales losses so that a step's gradient is that of the mean over all its loss tokens."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..warn_once import warn_once
from .plan import ShufflePlan
from .ranks import RankGroup

logger = logging.getLogger(__name__)

LOSS_REDUCTIONS = ("sum", "mean", "global_mean")
# A loop may exchange batches ahead, and all batches of an optimizer step before it scales a loss.
_MOST_OUTSTANDING = 8
WITHOUT_TOKENS = (
    "no rank has loss tokens in a step, so that its gradient is zero: check the labels, and what "
    "get_loss_tokens, or the batch's num_loss_tokens, returns"
)


def check_reduction(reduction: object) -> None:
    """Raises a ValueError unless `reduction` is one of `LOSS_REDUCTIONS`."""
    if reduction not in LOSS_REDUCTIONS:
        raise ValueError(
            f'loss_reduction={reduction!r}: expected what the model returns, the "sum" or "mean" of losses '
            'over this rank\'s loss tokens, or their "global_mean" over those of all ranks'
        )


def loss_sum(
    losses: torch.Tensor,
    reduction: str,
    num_loss_tokens: int | float,
    mean_tokens: float,
    failures: list[Exception] | None = None,
) -> torch.Tensor:
    """Returns the sum of the losses over this rank's loss tokens, 0-d.

    Without loss tokens, the sum is a zero that stays in the autograd graph, because collectives in the
    backward need every rank. Host and device synchronize only for a "mean" on a rank without loss tokens, or
    for a "global_mean" in a step without any.

    Args:
        losses, reduction: losses that the model returned, and its reduction of them.
        num_loss_tokens: loss tokens of this rank in this forward.
        mean_tokens: loss tokens of the step ÷ ranks, the factor that turns a "global_mean" into a sum.
        failures: list that receives the error if a mean over no loss tokens is not finite, so that all ranks
            can raise it. None means that only this rank raises it.

    Raises:
        ValueError: the losses are not 0-d for "mean" or "global_mean".
        MeanOfNoneError: a mean over no loss tokens is not finite.
    """
    losses = in_32_bits(losses)
    if reduction == "sum":
        total = losses.sum()
    elif losses.dim() == 0:
        total = losses * (num_loss_tokens if reduction == "mean" else mean_tokens)
    else:
        raise ValueError(
            f"the model returned losses of shape {tuple(losses.shape)}, but {reduction!r} is one number, and "
            f"this rank has {num_loss_tokens} loss tokens; of several means, return the sum, and for a loss "
            'per loss token, use "sum"'
        )
    if mean_tokens if reduction == "global_mean" else num_loss_tokens:
        return total
    if reduction != "sum" and not bool(total.isfinite()):  # synchronizes
        rank = dist.get_rank() if dist.is_initialized() else 0
        error = MeanOfNoneError(
            f"{f'rank {rank} has' if reduction == 'mean' else 'all ranks have'} no loss tokens in a step, "
            "and the model's mean over none is not finite. Clamp what the mean divides by, as in (losses * "
            'mask).sum() / mask.sum().clamp(min=1), or return the sum of the losses and use "sum"'
        )
        if failures is None:
            raise error
        failures.append(error)
    return total.masked_fill(torch.ones_like(total, dtype=torch.bool), 0.0)  # 0 × NaN would be NaN


def in_32_bits(losses: torch.Tensor) -> torch.Tensor:
    """Returns losses in float32 or wider. In a narrower dtype, their sum could be off by several percent."""
    return losses.to(torch.promote_types(losses.dtype, torch.float32))


class MeanOfNoneError(FloatingPointError):
    """A model's mean over no loss tokens is not finite, and would make the gradients of all ranks NaN."""


class LossScale:
    """Scales the losses of a user's own training loop, and warns if the loop forgets to scale."""

    def __init__(self, group: RankGroup, num_together: int) -> None:
        self._group, self._num_together = group, num_together
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._exchanged: list[weakref.ref[ShufflePlan]] = []
        self._outstanding = 0
        self._counted: tuple[list[ShufflePlan], torch.Tensor] | None = None

    def expect(self, plan: ShufflePlan) -> None:
        """Notes an exchanged batch, whose loss may need scaling. Warns once if losses remain unscaled."""
        self._exchanged = [each for each in self._exchanged if each() is not None] + [weakref.ref(plan)]
        if torch.is_grad_enabled():
            self._outstanding += 1
        if self._outstanding > _MOST_OUTSTANDING and (not dist.is_initialized() or dist.get_rank() == 0):
            warn_once(
                logger,
                "batches were exchanged, and their losses may not have been scaled by loss tokens. Call loss "
                "= shuffler.scale(loss, plan, reduction) before backward, with reduction=None if you scale "
                "it yourself; in evaluation exchange under torch.no_grad()",
            )

    def check_exchanged(self, plan: ShufflePlan) -> None:
        """Raises a ValueError if the samples of a plan should have moved, and have not."""
        if plan.moves and not any(each() is plan for each in self._exchanged):
            raise ValueError(
                "scale got a plan that was not exchanged, so that the loss is of other samples: call "
                "batch = shuffler.exchange(batch, plan) before the model runs"
            )

    def scaled(
        self,
        loss: torch.Tensor,
        plan: ShufflePlan,
        reduction: str | None,
        gradients: str,
        step_plans: Sequence[ShufflePlan] | None,
    ) -> torch.Tensor:
        """Returns the loss to call `backward` on. For arguments and errors, see `BatchShuffler.scale`."""
        plans = [plan] if step_plans is None else list(step_plans)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"scale got a {type(loss).__name__}, expected the loss, a tensor")
        if reduction is None:
            self._note_scaled()
            return loss
        check_reduction(reduction)
        if gradients not in ("mean", "sum"):
            raise ValueError(f'gradients={gradients!r}: expected "mean" or "sum", as ranks reduce them')
        if not any(one is plan for one in plans):
            raise ValueError("plan is not among step_plans; give scale the plans of the whole optimizer step")
        if reduction == "global_mean" and len(plans) > 1:
            raise ValueError(
                f'"global_mean" covers one batch, but step_plans has {len(plans)}: return the "mean" instead'
            )
        rank_loss = loss_sum(loss, reduction, plan.loss_tokens_on(self._group.rank), 1.0)
        copies = self._num_ranks if gradients == "mean" else self._num_together
        if reduction == "global_mean":  # the model has divided by its own count
            scaled = rank_loss * (copies / self._num_ranks)
        else:
            tokens = self._tokens_of_all_ranks(plans, loss.device)
            scale = copies / tokens
            # Multiplying by a scalar on the CPU copies nothing to the device, so the host never waits here.
            scaled = rank_loss * torch.where(tokens > 0, scale, torch.zeros_like(scale)).to(rank_loss.dtype)
        if scaled.requires_grad:  # it counts as scaled once the backward reaches it
            scaled.register_hook(self._note_scaled)
        else:
            self._note_scaled()
        return scaled

    def _note_scaled(self, _: torch.Tensor | None = None) -> None:
        self._outstanding = 0

    def _tokens_of_all_ranks(self, plans: list[ShufflePlan], device: torch.device) -> torch.Tensor:
        """Returns the plans' loss tokens over all ranks, 0-d float64, on the host unless they are reduced."""
        if self._group.num_ranks == self._num_ranks:
            total = math.fsum(plan.num_loss_tokens for plan in plans)
            if not total and self._group.rank == 0:
                warn_once(logger, WITHOUT_TOKENS)
            return torch.full((), total, dtype=torch.float64, device="cpu")
        if self._counted is None or list(map(id, self._counted[0])) != list(map(id, plans)):
            rank_tokens = math.fsum(plan.loss_tokens_on(self._group.rank) for plan in plans)
            # A kernel fills the tensor, because a copy from the host would make the host wait.
            tokens = torch.full((), rank_tokens, dtype=torch.float64, device=device)
            dist.all_reduce(tokens)
            self._counted = plans, tokens
        return self._counted[1]


# FBGEMM optimizers whose momentum changes a table row that was looked up, even if its gradient is zero.
# Row-wise Adagrad with weight decay does so, too.
_MOVING = ("ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB")


def check_runs_copies(
    plan: ShufflePlan, pads: bool, reduction: str | None, model: torch.nn.Module | None = None
) -> None:
    """Checks that running a copied row changes neither the loss nor the embedding tables.

    Args:
        plan: the plan of the step.
        pads: whether batches know their padding.
        reduction: the model's reduction of its losses.
        model: model of a pipeline. None if it is unknown, or does not train.

    Raises:
        ValueError: a copied row would count in a "global_mean" or in a bin, or change a table.
    """
    if pads or plan.whole.num_placed.all():
        return
    if plan.rows.bins is not None:
        raise ValueError(
            "a rank has no sample in this step and runs a copy of one, which ranks that compute together "
            "would count: use a BaseBatch, which has padding rows, or place samples on every rank"
        )
    if reduction == "global_mean":
        raise ValueError(
            "a rank has no sample in this step and runs a copy of one, which a model that returns "
            '"global_mean" counts: return the mean over this rank\'s loss tokens, and use "mean"'
        )
    if moving := _fused_optimizer(model):
        raise ValueError(
            f"a rank has no sample in this step and runs a copy of one, whose rows {moving} changes even "
            "with a gradient of zero: use a BaseBatch, which has padding rows, end all loaders in the same "
            "step, or train these tables with another optimizer, such as Adagrad"
        )


def _fused_optimizer(model: torch.nn.Module | None) -> str:
    """Returns which optimizer in a model's tables changes rows with zero gradient. Empty if none does."""
    for module in () if model is None else model.modules():
        # TorchRec keeps lookups in plain lists, so they are not submodules.
        listed = getattr(module, "_lookups", None)
        lookups = [of for of in listed if isinstance(of, torch.nn.Module)] if isinstance(listed, list) else []
        for tables in (module, *(inner for lookup in lookups for inner in lookup.modules())):
            name = getattr(getattr(tables, "optimizer", None), "name", None)
            if name in _MOVING:
                return f"the tables' {name}"
            mode = getattr(getattr(tables, "weight_decay_mode", None), "name", "NONE")
            decay = getattr(getattr(tables, "optimizer_args", None), "weight_decay", 0.0)
            if name == "EXACT_ROWWISE_ADAGRAD" and mode != "NONE" and decay:
                return "the tables' weight decay"
    return ""
