from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.forked_ranks import forked_ranks
from tests.e2e.movielens_files import prepare_movielens
from tests.e2e.torchrun import RANKING, REPOSITORY, bind, torchrun

CONFIG = REPOSITORY / "hstu/training/configs/movielens_100k_ranking.gin"
SMALL = [
    "TrainerArgs.train_batch_size = 8",
    "TrainerArgs.eval_interval = 2",
    "TrainerArgs.log_interval = 2",
    "TrainerArgs.max_train_iters = 4",
    "DatasetArgs.max_history_seqlen = 16",
    "NetworkArgs.hidden_size = 16",
    "NetworkArgs.kv_channels = 8",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with a small dataset."""
    directory = tmp_path_factory.mktemp("movielens")
    prepare_movielens(directory)
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trains_and_evaluates_in_half_precision(workspace, dtype):
    forked_ranks(
        workspace,
        *RANKING,
        "--gin-config-file",
        CONFIG,
        *bind(
            *SMALL,
            f'NetworkArgs.dtype_str = "{dtype}"',
            f'TrainerArgs.log_dir = "{dtype}"',
            "TrainerArgs.enable_balanced_shuffler = True",
        ),
    )
    log = [json.loads(line) for line in (workspace / dtype / "train.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log] == ["start", "train", "eval", "train", "eval"]
    for line in log[1:]:
        if line["kind"] == "eval":
            assert 0 < line["AUC"] < 1
        else:
            assert 0 < line["loss"] < 5


def test_an_id_outside_its_table_stops_the_run(workspace):
    path = workspace / "data/ml-100k/meta.json"
    intact = path.read_text()
    meta = json.loads(intact)
    meta["vocab_sizes"]["movie_id"] = 9
    path.write_text(json.dumps(meta))
    try:
        output = torchrun(workspace, *RANKING, "--gin-config-file", CONFIG, *bind(*SMALL), fails=True)
    finally:
        path.write_text(intact)
    error = "is malformed: feature 'movie_id' has ids 1 to 50 in a vocabulary of 9; prepare it again"
    assert output.count(error) == 1, output
