"""Costs from measured steps, or learned during training, and training balanced by them."""

from functools import partial

import pytest

from commons.check_equal import check_equal
from commons.perf_model import Cost
from commons.training import OptimizerArgs, TrainerArgs
from tests.commons.extensions.learned_costs.internals import MeasuredSteps
from tests.commons.training.internals import _pipelines
from tests.commons.training.small_task import (
    CPU,
    lines_in,
    small_dataset,
    small_run,
    small_task,
)
from tests.hstu.hstu_samples import ranking_model


def test_training_is_balanced_by_the_measured_cost(pools, tmp_path):
    Cost((1e6, 0.0, 0.0, 0.0), per_step=1e7).save(tmp_path / "cost.json")
    settings = {"enable_balanced_shuffler": True, "balance_cost": str(tmp_path / "cost.json")}
    pools(2).run(partial(small_run, str(tmp_path), **settings))
    lines = lines_in(tmp_path, "train")
    assert len(lines) == 4
    for line in lines:
        assert line["loads_after"] == pytest.approx([1e6 * samples for samples in line["samples_after"]])
        assert line["unit"] == "predicted ns"
        assert line["predicted_ms"] == pytest.approx([10 + samples for samples in line["samples_after"]])


def test_a_missing_cost_file_is_named_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"TrainerArgs.balance_cost = .*cost.json.: expected .flops"):
        TrainerArgs(train_batch_size=1, balance_cost=str(tmp_path / "cost.json"))


STEPS, STOP = 60, 40


def _learn(folder: str, num_steps: int) -> None:
    small_run(
        f"{folder}/logs",
        max_train_iters=num_steps,
        log_interval=10,
        eval_interval=30,
        ckpt_save_interval=20,
        ckpt_save_dir=f"{folder}/checkpoints",
        enable_balanced_shuffler=True,
        balance_cost="learned",
        balance_equal_rows=False,
        balance_verify=True,
        pipeline_type="native",
    )


def test_ranks_that_learn_plan_alike_through_evaluations_checkpoints_and_a_resume(pools, tmp_path):
    for last in (STOP, STEPS):
        pools(2).run(partial(_learn, str(tmp_path), last))
    lines = lines_in(tmp_path / "logs", "train")
    assert [line["step"] for line in lines] == list(range(10, STEPS + 1, 10))
    learned = [line for line in lines if "predicted_ms" in line]
    # Not while the first times are on their way; and from the first step after the resume.
    assert [line["step"] for line in learned] == list(range(30, STEPS + 1, 10))
    assert all(len(line["predicted_ms"]) == len(line["speeds"]) == 2 for line in learned)
    assert Cost.load(tmp_path / "logs" / "learned_cost.json").median_error > 0
    # Of the resumed run, the line at step 60: the line at 50 starts within the first steps.
    (first, second) = MeasuredSteps.read(tmp_path / "logs" / "train.jsonl")
    assert first[0] > 0 and first[-1] > 0 and len(first) == len(second) == 5


def _compared() -> tuple[bool, int]:
    def make_task(args, device):
        single = args.single_rank_load
        return small_task(ranking_model(), small_dataset(27, single), small_dataset(13, single))

    args = TrainerArgs(4, enable_balanced_shuffler=True, single_rank_load=True, pipeline_type="none")
    report = check_equal(_pipelines(args, OptimizerArgs("sgd", 0.5), CPU, make_task), 2)
    return report.is_equal, report.samples_moved


def test_a_run_that_one_rank_loads_is_compared_with_one_that_all_load(pools):
    assert [(is_equal, moved > 0) for is_equal, moved in pools(2).run(_compared)] == [(True, True)] * 2
