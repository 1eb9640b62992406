"""The SID-GR model trains on prepared and on random data, with files of recsys-examples and of its own."""

from pathlib import Path

import pytest

from tests.e2e.gin_files import RECSYS_EXAMPLES_SID_GR
from tests.e2e.shop_files import CATALOGUE, prepare_shop
from tests.e2e.torchrun import REPOSITORY, SID_GR, bind, train_log

CONFIGS = REPOSITORY / "sid_gr/training/configs"
SMALL = [
    "TrainerArgs.train_batch_size = 8",
    "TrainerArgs.eval_batch_size = 8",
    "TrainerArgs.max_train_iters = 4",
    "TrainerArgs.eval_interval = 2",
    "TrainerArgs.log_interval = 1",
    "NetworkArgs.num_layers = 2",
    "NetworkArgs.hidden_size = 16",
    "NetworkArgs.num_attention_heads = 2",
    "NetworkArgs.kv_channels = 8",
    *CATALOGUE,
    "DatasetArgs.max_history_length = 12",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """Returns a folder with prepared data: 50 users with histories of 0 to 30 items, of 60 items in all."""
    directory = tmp_path_factory.mktemp("shop")
    prepare_shop(directory, [user * 11 % 31 for user in range(50)], (70, 0, 30))
    (directory / "shop.gin").write_text(RECSYS_EXAMPLES_SID_GR)
    return directory


def test_a_file_of_recsys_examples_runs_with_size_overrides(kept_ranks, workspace):
    settings = bind(*SMALL, 'TrainerArgs.log_dir = "logs"')
    output = kept_ranks.train(workspace, *SID_GR, "--gin-config-file", "shop.gin", *settings)
    log = train_log(workspace / "logs")
    assert [line["kind"] for line in log] == ["start"] + 2 * ["train", "train", "eval"]
    for line in log:
        if line["kind"] == "eval":
            assert line.keys() == {"kind", "step", "NDCG@5", "NDCG@10", "Recall@10", "HitRate@5"}
            assert 0 < line["NDCG@5"] <= line["NDCG@10"] <= line["Recall@10"] < 1
    for setting in (
        'TrainerArgs.pipeline_type = "prefetch"',
        'NetworkArgs.kernel_backend = "triton"',
        "NetworkArgs.item_embedding_dim",
        "NetworkArgs.scaling_seqlen",
        "DatasetArgs.deduplicate_label_across_hierarchy",
    ):
        assert output.count(setting) == 1, f"expected one warning about {setting}:\n{output}"
    assert "fused Adam" not in output, output  # the model has no sharded table


def test_a_check_on_random_data_takes_another_learning_rate_and_no_files(kept_ranks, tmp_path):
    check = "--check-equal", "5", "--gin-bindings", "OptimizerArgs.learning_rate = 1.0"
    printed = kept_ranks.train(tmp_path, *SID_GR, "--gin-config-file", CONFIGS / "sid_random.gin", *check)
    # With the default, 0.1, rounding hides what weights change by.
    assert "equal: 5 steps, " in printed and "and differs by at most" in printed
    assert list(tmp_path.iterdir()) == [] and "runs instead" not in printed


@pytest.mark.parametrize(
    ("binding", "error"),
    [
        ("TrainerArgs.top_k_for_generation = 5", "TrainerArgs.eval_metrics = 'NDCG@10': expected k of at"),
        ("DatasetArgs.codebook_sizes = [16, 16, 9]", "ValueError: item_to_sid.pt: item"),
    ],
)
def test_bad_setting(kept_ranks, workspace, binding, error):
    settings = bind(*SMALL, binding)
    assert error in kept_ranks.refuse(workspace, *SID_GR, "--gin-config-file", "shop.gin", *settings)
