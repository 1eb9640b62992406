"""The retrieval model trains and evaluates the same in every mode."""

import pytest

from tests.e2e.movielens_files import prepare_movielens
from tests.e2e.torchrun import REPOSITORY, RETRIEVAL, bind, train_log

CONFIG = (*RETRIEVAL, "--gin-config-file", REPOSITORY / "hstu/training/configs/movielens_100k_retrieval.gin")
SMALL = [
    "TrainerArgs.train_batch_size = 4",
    "TrainerArgs.eval_interval = 2",
    "TrainerArgs.log_interval = 2",
    "TrainerArgs.max_train_iters = 6",
    "DatasetArgs.max_history_seqlen = 16",
    "NetworkArgs.hidden_size = 16",
    "NetworkArgs.item_embedding_dim = 8",
    "NetworkArgs.kv_channels = 8",
    "NetworkArgs.hidden_dropout = 0.0",
    "RetrievalArgs.num_negatives = 8",
    'RetrievalArgs.eval_metrics = ("HR@10", "NDCG@10", "HR@50")',
]


def test_micro_batches_train_and_evaluate_the_same(kept_ranks, tmp_path):
    prepare_movielens(tmp_path)

    def train(log_dir: str, *bindings: str) -> list[dict]:
        settings = bind(*SMALL, *bindings, f"TrainerArgs.log_dir = '{log_dir}'")
        kept_ranks.train(tmp_path, *CONFIG, *settings)
        return train_log(tmp_path / log_dir)

    as_loaded = train("as_loaded", 'TrainerArgs.pipeline_type = "none"')
    balanced = "TrainerArgs.enable_balanced_shuffler = True"
    log = train("micro_batches", balanced, "TrainerArgs.max_tokens_per_micro_batch = 60")
    assert [line["kind"] for line in log] == ["start", *["train", "eval"] * 3]
    for line, expected in zip(log[1:], as_loaded[1:], strict=True):
        if line["kind"] == "eval":
            assert 0 < line["NDCG@10"] < line["HR@10"] < line["HR@50"] == 1  # there are 50 items
            assert line == pytest.approx(expected, abs=1.01 / 40)  # rounding may move one user of 40
        else:
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert line["imbalance_after"] < line["imbalance_before"]
