"""All ranks stop in the same step for what only one of them knows."""

import os
import signal
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from commons.training import NonFiniteLossError, OptimizerArgs, TrainerArgs, train
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.distributed.internals import RankGroup
from tests.commons.training.internals import StepVote
from tests.commons.training.small_task import CPU, small_dataset, small_task
from tests.hstu.hstu_samples import ranking_model
from tests.on_ranks import on_ranks


def _hand_out(vote: StepVote) -> None:
    """Hands out the votes of all ranks, as a plan's gather carries them."""
    vote.take(RankGroup.of().channel().all_gather(vote.post()))


@pytest.mark.parametrize(
    ("losses_of_ranks", "last_step", "error"),
    [
        ([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]], 3, "the loss of step 2 is not finite on rank 1"),
        ([[1.0, float("inf")], [1.0, float("nan")]], 2, "the loss of step 2 is not finite on rank 0"),
        ([[1.0, 2.0], [1.0, 2.0]], 2, None),
    ],
)
@on_ranks(2)
def test_the_first_bad_loss_stops_all_ranks_in_one_step(losses_of_ranks, last_step, error):
    vote, losses = StepVote(), losses_of_ranks[dist.get_rank()]
    with pytest.raises(NonFiniteLossError, match=f"^{error}") if error else nullcontext():
        for step, loss in enumerate(losses, 1):
            _hand_out(vote)
            vote.after_step(step, torch.tensor(loss))
        vote.finish()
    assert step == last_step


@on_ranks(2)
def test_a_request_to_one_rank_reaches_all_with_the_next_plan_and_stays():
    vote, answers = StepVote(), []
    with vote.listening():
        for number in range(1, 6):
            _hand_out(vote)
            if number == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(vote.after_step(number, torch.tensor(1.0)))
        vote.finish()
    assert answers == [False, False, False, True, True]


@on_ranks(2)
def test_in_a_thread_votes_count_and_rank_0_names_what_is_missing():
    vote, counted = StepVote(), []

    def listen() -> None:
        with vote.listening():
            _hand_out(vote)
            counted.append(vote.after_step(1, torch.tensor(1.0)))

    with warnings_of("commons") as records:
        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
    assert counted == [False]
    assert len(records) == (dist.get_rank() == 0) and all("SIGTERM" in record for record in records)


def _train_spoiled(folder: str, interval: int, spoiled: str) -> str:
    """The step after which training failed, and how; rank 1's loss of step 4, or its gradient, is NaN."""
    model = ranking_model()
    steps = 0

    def spoil(module, inputs, output):
        nonlocal steps
        steps += module.training
        losses, rest = output
        if steps == 4 and module.training and dist.get_rank() == 1:
            if spoiled == "loss":
                losses = losses * float("nan")
            else:
                losses.register_hook(lambda gradient: gradient * float("nan"))
        return losses, rest

    model.dense.register_forward_hook(spoil)
    task = small_task(model, small_dataset(40), small_dataset(13))
    args = TrainerArgs(
        train_batch_size=4,
        log_dir=f"{folder}/logs",
        pipeline_type="none",
        ckpt_save_interval=interval,
        ckpt_save_dir=f"{folder}/checkpoints",
    )
    with pytest.raises(NonFiniteLossError) as error:
        train(task, args, OptimizerArgs("sgd", 0.05), CPU)
    return f"{steps}: {error.value}"


@pytest.mark.parametrize(
    ("interval", "spoiled", "bad_step", "last_steps"),
    [
        (1, "loss", 4, [4]),  # before a checkpoint, ranks vote
        (3, "loss", 4, [5, 6]),
        (1, "gradient", 5, [5]),  # parameters that are not finite are no checkpoint
    ],
)
def test_training_stops_within_two_steps_and_no_checkpoint_is_after_a_bad_loss(
    pools, tmp_path, interval, spoiled, bad_step, last_steps
):
    for answer in pools(2).run(_train_spoiled, str(tmp_path), interval, spoiled):
        stopped_in, _, error = answer.partition(": ")
        assert error.startswith(f"the loss of step {bad_step} is not finite on rank ")
        assert int(stopped_in) in last_steps
    folders = (tmp_path / "checkpoints").iterdir()
    assert max(path.name for path in folders if path.suffix != ".unfinished") == "step_3"


@pytest.mark.parametrize(("message", "times"), [("gloo/transport: closed", 1), ("of its own", 0)])
def test_a_stop_that_another_ranks_failure_caused_is_not_swallowed(message, times):
    """Torchrun's SIGTERM may come while this rank is still in the loop."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(RuntimeError, match=message), StepVote().listening():
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError(message)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(received) == times
