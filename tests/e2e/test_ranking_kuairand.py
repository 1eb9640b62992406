from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commons.datasets.kuairand_files import write_kuairand_1k
from tests.e2e.forked_ranks import forked_ranks
from tests.e2e.torchrun import ENVIRONMENT, RANKING, REPOSITORY, bind, torchrun

CONFIG = REPOSITORY / "hstu/training/configs/kuairand_1k_ranking.gin"
SMALL = [
    "TrainerArgs.eval_interval = 2",
    "TrainerArgs.log_interval = 2",
    "TrainerArgs.max_train_iters = 2",
    "DatasetArgs.max_history_seqlen = 16",
    "NetworkArgs.hidden_size = 16",
    "NetworkArgs.kv_channels = 8",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with prepared data of 40 users in the format of kuairand-1k."""
    directory = tmp_path_factory.mktemp("kuairand")
    write_kuairand_1k(directory / "data/kuairand-1k/raw", num_events=2_000, num_users=40, num_videos=300)
    subprocess.run(
        [sys.executable, "-m", "commons.datasets.kuairand_preprocess", "--dataset", "kuairand-1k"],
        cwd=directory,
        env=ENVIRONMENT,
        check=True,
    )
    return directory


def test_trains_and_evaluates_each_task(workspace):
    balanced = ('TrainerArgs.log_dir = "logs"', "TrainerArgs.enable_balanced_shuffler = True")
    forked_ranks(workspace, *RANKING, "--gin-config-file", CONFIG, *bind(*SMALL, *balanced))
    log = [json.loads(line) for line in (workspace / "logs/train.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log] == ["start", "train", "eval"]
    assert 0 < log[1]["loss"] < 5
    assert {f"AUC_task{task}" for task in range(8)} <= set(log[2])
    assert 0 < log[2]["AUC_task0"] < 1


def test_a_head_of_other_tasks_stops_the_run(workspace):
    bindings = bind(*SMALL, "RankingArgs.num_tasks = 1", "RankingArgs.prediction_head_arch = [16, 256]")
    output = torchrun(workspace, *RANKING, "--gin-config-file", CONFIG, *bindings, fails=True)
    error = (
        "RankingArgs.num_tasks = 1, prediction_head_arch = [16, 256]: the dataset has 8 tasks, "
        "expected num_tasks = 8 and this as the last width"
    )
    assert output.count(error) == 1, output
