"""The ranking model trains on prepared datasets, with the configurations that ship for them."""

import contextlib

from commons.datasets import kuairand_preprocess
from tests.commons.datasets.kuairand_files import write_kuairand_1k
from tests.e2e.movielens_files import prepare_movielens
from tests.e2e.torchrun import RANKING, REPOSITORY, bind, train_log

CONFIGS = REPOSITORY / "hstu/training/configs"
MOVIELENS = (*RANKING, "--gin-config-file", CONFIGS / "movielens_100k_ranking.gin")
KUAIRAND = (*RANKING, "--gin-config-file", CONFIGS / "kuairand_1k_ranking.gin")
SMALL = [
    "TrainerArgs.train_batch_size = 8",
    "TrainerArgs.eval_interval = 2",
    "TrainerArgs.log_interval = 2",
    "TrainerArgs.max_train_iters = 2",
    "DatasetArgs.max_history_seqlen = 16",
    "NetworkArgs.hidden_size = 16",
    "NetworkArgs.kv_channels = 8",
]
BALANCED = [*SMALL, 'TrainerArgs.log_dir = "logs"', "TrainerArgs.enable_balanced_shuffler = True"]


def test_movielens_in_half_precision(kept_ranks, tmp_path):
    prepare_movielens(tmp_path)
    settings = bind(*BALANCED, "TrainerArgs.max_train_iters = 4", 'NetworkArgs.dtype_str = "float16"')
    kept_ranks.train(tmp_path, *MOVIELENS, *settings)
    log = train_log(tmp_path / "logs")
    assert [line["kind"] for line in log] == ["start", "train", "eval", "train", "eval"]
    assert all(0 < line["loss"] < 5 for line in log if line["kind"] == "train")
    assert all(0 < line["AUC"] < 1 for line in log if line["kind"] == "eval")


def test_kuairand_evaluates_each_task_and_refuses_a_head_of_others(kept_ranks, tmp_path):
    write_kuairand_1k(tmp_path / "data/kuairand-1k/raw", num_events=2_000, num_users=40, num_videos=300)
    with contextlib.chdir(tmp_path):
        kuairand_preprocess.main(["--dataset", "kuairand-1k"])
    kept_ranks.train(tmp_path, *KUAIRAND, *bind(*BALANCED))
    start, train, evaluation = train_log(tmp_path / "logs")
    assert [start["kind"], train["kind"], evaluation["kind"]] == ["start", "train", "eval"]
    assert 0 < train["loss"] < 5
    assert {f"AUC_task{task}" for task in range(8)} <= set(evaluation)
    assert 0 < evaluation["AUC_task0"] < 1
    wrong_head = bind(*SMALL, "RankingArgs.num_tasks = 1", "RankingArgs.prediction_head_arch = [16, 256]")
    output = kept_ranks.refuse(tmp_path, *KUAIRAND, *wrong_head)
    assert "RankingArgs.num_tasks = 1" in output and "expected num_tasks = 8" in output
