"""A job whose rank is killed goes on under torchrun."""

from tests.e2e.gin_files import RANDOM_DATA
from tests.e2e.torchrun import RANKING, bind, torchrun, train_log

NUM_STEPS = 9
SETTINGS = f"""
TrainerArgs.max_train_iters = {NUM_STEPS}
TrainerArgs.enable_balanced_shuffler = True
TrainerArgs.ckpt_save_interval = 2
TrainerArgs.ckpt_save_dir = "checkpoints"
NetworkArgs.hidden_dropout = 0.2
"""


def test_a_job_resumes_after_a_rank_is_killed(kept_ranks, tmp_path):
    (tmp_path / "config.gin").write_text(RANDOM_DATA + SETTINGS)
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", "config.gin", "exchange", restarts=1)
    assert "failed (exitcode: -9) local_rank: 1" in output
    assert "Traceback" not in output  # rank 0 says that it lost the connection, unless it is ended sooner
    assert "training resumes from checkpoints/step_" in output
    assert f"the checkpoint of step {NUM_STEPS} is in {tmp_path}/checkpoints" in output
    whole = bind('TrainerArgs.log_dir = "whole"', "TrainerArgs.ckpt_save_interval = -1")
    kept_ranks.train(tmp_path, *RANKING, "--gin-config-file", "config.gin", *whole)
    losses, expected = (
        [(line["step"], line["loss"]) for line in train_log(tmp_path / logs) if line["kind"] == "train"]
        for logs in ("logs", "whole")
    )
    steps = [step for step, _ in losses]
    resumed = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[resumed:] == list(range(steps[resumed], NUM_STEPS + 1))
    assert dict(losses) == dict(expected) and len(expected) == NUM_STEPS  # those of steps that ran twice, too
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("[!.]*"))
    assert checkpoints == ["step_2", "step_4", "step_6", "step_8", "step_9"]
