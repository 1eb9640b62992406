"""Training is the same however its samples are loaded, placed and run."""

from functools import partial

import pytest
import torch.distributed as dist

from tests.commons.training.small_task import small_run
from tests.process_pool import ProcessPool

TWO_EPOCHS = {"max_train_iters": 8}
BALANCED = {"enable_balanced_shuffler": True, "balance_verify": True}
OFTEN = {"eval_interval": 3}
MICRO_BATCHES = {"max_tokens_per_micro_batch": 30}


@pytest.fixture(scope="module")
def run(pools, tmp_path_factory):
    """Losses and evaluations of a run of two epochs; one that ran before is not run again."""
    runs = {}

    def run(ranks: int = 2, **settings):
        key = ranks, *sorted(settings.items())
        if key not in runs:
            folder = str(tmp_path_factory.mktemp("run"))
            runs[key] = pools(ranks).run(partial(small_run, folder, **TWO_EPOCHS, **settings))[0]
        return runs[key]

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_type": "native", **OFTEN},
        {"pipeline_type": "none", **BALANCED, **OFTEN},
        {"pipeline_type": "native", **BALANCED, **OFTEN},
        {"pipeline_type": "none", **MICRO_BATCHES, **OFTEN},
        {"pipeline_type": "native", **BALANCED, **MICRO_BATCHES},
        {"pipeline_type": "native", **BALANCED, "single_rank_load": True},
        {"pipeline_type": "prefetch", **BALANCED, "single_rank_load": True, "balance_equal_rows": False},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_mode_trains_and_evaluates_the_same(run, settings):
    plain, evaluation = run(pipeline_type="none")
    losses, evaluations = run(**settings)
    assert [step for step, _ in losses] == list(range(1, 9))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in plain], rel=1e-5)
    assert evaluations == (3 if "eval_interval" in settings else 1) * evaluation  # all labels, each once


def test_every_evaluation_label_counts_once_on_any_number_of_ranks(run):
    assert run(ranks=3, **BALANCED)[1] == run(pipeline_type="none")[1]


def _groups_of_a_run(folder: str) -> int:
    settings = {**BALANCED, **OFTEN, "max_train_iters": 6, "ckpt_save_interval": 2}
    small_run(folder, **settings, ckpt_save_dir=f"{folder}/checkpoints")
    return len(dist.distributed_c10d._world.pg_map)


def test_a_run_makes_two_groups_next_to_that_of_the_job(tmp_path):
    pool = ProcessPool(2)  # of its own, to count its groups
    assert pool.run(_groups_of_a_run, str(tmp_path)) == [3, 3]
    pool.close()
