"""The shuffle stage: the part of a balanced pipeline between its loader and its model."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from ..distributed import BalanceReport, BatchShuffler
from ..distributed.exchange import Step
from ..distributed.extension import chain
from ..distributed.loss import WITHOUT_TOKENS, check_reduction, check_runs_copies, in_32_bits, loss_sum
from ..distributed.ranks import RankGroup
from ..named_ranges import named_range
from ..sequence_batch.fields import type_name
from ..warn_once import warn_once

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


def _ends_no_epoch(method: Callable[P, T]) -> Callable[P, T]:
    """Turns a StopIteration of a method, which would signal the end of all loaders, into a RuntimeError."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(f"the model, or an extension, raised {error!r} in a step") from error

    return call


class LastStep(NamedTuple):
    """The step that ran last, without its batch, and this rank's loss sum, detached scalars on the device."""

    step: Step
    loss_sum: torch.Tensor  # which callers may change in place
    own_loss_sum: torch.Tensor  # a copy that such changes do not affect


class ShuffleStage:
    """Plans host batches ahead, exchanges device batches, and scales the loss.

    A `Step` carries a batch and its plan from `next_batch` to `forward`. While `"native"` computes step i:

    | step  | stage                        | by           | thread   | stream    |
    |-------|------------------------------|--------------|----------|-----------|
    | i + 3 | load                         | `next_batch` | training |           |
    | i + 3 | count, gather, place, route  | `PlanAhead`  | planning | (gloo)    |
    | i + 2 | copy to the device           | `Step.to`    | training | memcpy    |
    | i + 2 | exchange, put together       | `exchange`   | training | memcpy    |
    | i + 1 | input distribution           | TorchRec     | training | data_dist |
    | i     | forward, backward, optimizer | `forward`    | training | default   |

    In each step, the training thread runs the collective of the shuffler's exchange, and the planning thread
    those of the `Planner`. Construction is collective.

    Attributes:
        ahead: the `PlanAhead` that plans the next steps.
        rank: this rank's index among the ranks of a plan.
        postponed: errors of all ranks in loading or planning, each to be raised between two steps.

    Raises:
        TypeError: `shuffler` is not a BatchShuffler.
        ValueError: the loss reduction is unknown, or an extension does not work with it.
    """

    def __init__(
        self,
        shuffler: BatchShuffler | None,
        model: torch.nn.Module,
        device: torch.device,
        loss_reduction: str | None,
    ) -> None:
        if not isinstance(shuffler, BatchShuffler):
            raise TypeError(f"batch_shuffler is {shuffler!r}; expected a BatchShuffler")
        check_reduction(loss_reduction)
        self._loss_reduction = str(loss_reduction)
        self._shuffler, self._model = shuffler, model
        shuffler.expects_scale = False
        shuffler.plan_over(RankGroup.of())
        for extension in shuffler.extensions:
            extension.join(model, device, self._loss_reduction)
        self._forward = chain(shuffler.extensions, "forward", self._run)
        self.ahead = shuffler.ahead(device)
        self.rank = shuffler.group.rank
        self._last: LastStep | None = None
        self._ended: Iterator[Any] | None = None  # the loader that has ended, until its last step has run
        self.postponed: list[Exception] = []

    @_ends_no_epoch
    def next_batch(self, loader: Iterator[Any]) -> Step | None:
        """Returns the next planned step, not yet copied to the device; None once all loaders have ended.

        After the end, it does not ask the loader again until `end_epoch`, while the last steps still run.

        Raises:
            ValueError: a rank has no samples, and must not run a copy of a row instead. All ranks raise it.
        """
        step = None if loader is self._ended else self.ahead.next_step(loader)
        self._ended = loader if step is None else None
        if step is not None:
            trained = self._model if self._model.training else None
            check_runs_copies(step.plan, step.rows.pads, self._loss_reduction, trained)
        return step

    @_ends_no_epoch
    def exchange(self, step: Step) -> Step:
        """Carries out the plan of a step on the device. Collective over the ranks that balance together.

        Raises:
            TypeError: the step did not come from `next_batch`.
        """
        check_planned(step)
        with named_range("## exchange ##"):
            start = time.perf_counter()
            step.rows = self._shuffler.exchange_rows(step.rows, step.plan)
            step.exchange_seconds = time.perf_counter() - start
        return step

    @_ends_no_epoch
    def forward(self, step: Step) -> tuple[torch.Tensor, Any]:
        """Runs the model on an exchanged batch; returns the loss to run backward on, and the model's output.

        Data-parallel training averages gradients over ranks. The loss is scaled so that this average is the
        gradient of the mean over all loss tokens of the step (0 without any). A "global_mean" is not scaled.
        """
        if self._shuffler.planner.ranks.rank == 0:
            if self._model.training and not step.plan.whole.num_loss_tokens:
                warn_once(logger, WITHOUT_TOKENS)
            elif not (self._model.training or step.rows.pads or step.plan.whole.num_placed.all()):
                warn_once(
                    logger,
                    "a rank without samples evaluates a copy of a row, which is in its output: count only "
                    "output[: pipeline.num_samples], as all ranks may",
                )
        loss, total, output = self._forward(step)
        for extension in self._shuffler.extensions:
            extension.check_ran(step.plan)
        self._last = LastStep(step, total, total.clone())
        for failure in step.failures[:1]:
            self.ahead.failure = failure
        return loss, output

    def _run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Runs the model on a whole batch."""
        losses, output = losses_and_output(self._model(step.batch))
        mean_tokens = step.plan.whole.num_loss_tokens / step.plan.whole.num_ranks
        own_tokens = step.plan.loss_tokens_on(self.rank)
        total = loss_sum(losses, self._loss_reduction, own_tokens, mean_tokens, step.failures)
        # A "global_mean" needs no scaling, and may be over something other than loss tokens.
        loss = in_32_bits(losses) if self._loss_reduction == "global_mean" else total * step.scale_to_mean
        return loss, total.detach(), output

    def names(self, attribute: str) -> list[str]:
        """Returns the names of the extensions whose attribute of this name is true."""
        return [extension.name for extension in self._shuffler.extensions if getattr(extension, attribute)]

    def let_go(self, step: Step) -> None:
        """Releases the batch of a step that has run. Raises a TypeError if `forward` did not run it last."""
        if self._last is None or self._last.step is not step:
            raise TypeError(
                "the pipeline's progress called the model directly, so its loss was not scaled: call "
                "self._model_fwd(batch), as TorchRec's progress does"
            )
        step.let_go()

    def end_epoch(self) -> None:
        """Lets `next_batch` start the next epoch, after the last step. All ranks call it together.

        Raises:
            Exception: one of the last steps failed, and no plan told other ranks. Only this rank raises it.
        """
        self._ended = None
        failure, self.ahead.failure = self.ahead.failure, None
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Drops the planned steps, as a pipeline drops its batches. All ranks must call it.

        A failure of the last step that no plan has carried to other ranks is only logged.
        """
        self.ahead.drop()
        for failure in filter(None, (*self.postponed, self.ahead.failure)):
            logger.error(f"reset drops {failure!r}")
        self.ahead.failure = self._ended = None
        self.postponed.clear()

    def report(self) -> BalanceReport:
        """Returns the report of the last step, with the bytes and times of this rank."""
        step, shuffler = self.last.step, self._shuffler
        sent, received = step.plan.traffic
        figures: dict[str, Any] = {}
        for extension in shuffler.extensions:
            figures |= extension.report(step.plan)
        return BalanceReport.of(
            step.plan,
            shuffler.settings.equal_rows,
            shuffler.unit,
            bytes_sent=sent,
            bytes_received=received,
            load_seconds=step.load_seconds,
            plan_wait_seconds=step.wait_seconds,
            exchange_seconds=step.exchange_seconds,
            extensions=figures,
        )

    @property
    def last(self) -> LastStep:
        """The step that ran last. Raises a RuntimeError if none has run."""
        if self._last is None:
            raise RuntimeError("there is no plan, report or loss before the first step")
        return self._last


def check_planned(batch: Any) -> None:
    """Raises a TypeError unless a pipeline's batch is a `Step`, as `next_batch` returns it."""
    if not isinstance(batch, Step):
        raise TypeError(
            f"the pipeline copied a {type_name(batch)} that was not planned: its copy_batch_to_gpu or "
            "enqueue_batch must take batches from self._next_batch(dataloader_iter), and return the results "
            "of their `to`"
        )


@contextmanager
def note_on_static_graphs() -> Iterator[None]:
    """While active, explains errors of DistributedDataParallel about a graph that is static and changes.

    TorchRec's DistributedModelParallel makes it static for every model, and most work so.
    """
    try:
        yield
    except RuntimeError as error:
        if "static_graph" in str(error):
            error.add_note(
                "Samples that move may need other parameters than those that stay, as with a tower per "
                "domain: give DistributedModelParallel data_parallel_wrapper=DefaultDataParallelWrapper("
                "static_graph=False, find_unused_parameters=True), or have the forward use all parameters"
            )
        raise


def losses_and_output(returned: Any) -> tuple[torch.Tensor, Any]:
    """Returns a model's losses and output. Raises a TypeError unless they are a tensor and one more value."""
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], torch.Tensor):
        return returned[0], returned[1]
    raise TypeError(
        f"the model returned a {type_name(returned)}; a pipeline expects (losses, output), losses a tensor "
        "and output whatever metrics need, or None: return loss, None for a loss alone, and add up a dict of "
        "losses"
    )
