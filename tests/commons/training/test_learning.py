"""A training that learns costs: evaluated, stopped and resumed, with every plan verified."""

from functools import partial

from commons.perf_model import Cost
from tests.commons.training.small_task import lines_in, small_run

STEPS, STOP = 500, 260


def _train(folder: str, num_steps: int) -> None:
    small_run(
        f"{folder}/logs",
        max_train_iters=num_steps,
        log_interval=10,
        eval_interval=100,
        ckpt_save_interval=130,
        ckpt_save_dir=f"{folder}/checkpoints",
        enable_balanced_shuffler=True,
        balance_cost="learned",
        balance_equal_rows=False,
        balance_verify=True,
        pipeline_type="native",
    )


def test_ranks_plan_alike_through_evaluations_checkpoints_and_a_resume(pools, tmp_path):
    for last in (STOP, STEPS):
        pools(2).run(partial(_train, str(tmp_path), last))
    lines = lines_in(tmp_path / "logs", "train")
    assert [line["step"] for line in lines] == list(range(10, STEPS + 1, 10))
    learned = [line for line in lines if "predicted_ms" in line]
    # Not while the first times are on their way; and from the first step after the resume.
    assert [line["step"] for line in learned] == list(range(30, STEPS + 1, 10))
    assert all(len(line["predicted_ms"]) == len(line["speeds"]) == 2 for line in learned)
    assert Cost.load(tmp_path / "logs" / "learned_cost.json").median_error > 0
