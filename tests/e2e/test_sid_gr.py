"""The SID-GR model trains on prepared and on random data, with files of recsys-examples and of its own."""

from pathlib import Path

import pytest

from commons.datasets import sid_preprocess
from tests.e2e.gin_files import RECSYS_EXAMPLES_SID_GR
from tests.e2e.shop_files import CATALOGUE, prepare_shop
from tests.e2e.torchrun import REPOSITORY, SID_GR, bind, torchrun, train_log

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
        "OptimizerArgs.weight_decay = 0.01",
    ):
        assert output.count(setting) == 1, f"expected one warning about {setting}:\n{output}"
    assert "fused Adam" not in output, output  # the model has no sharded table


def test_every_way_to_read_and_to_place_samples_trains_the_same(kept_ranks, workspace):
    logs = []
    for suffix, balanced, ranks in (("pt", False, 1), ("json", True, 2)):
        settings = bind(
            *SMALL,
            f'TrainerArgs.log_dir = "{suffix}"',
            'NetworkArgs.dtype_str = "float32"',
            "NetworkArgs.hidden_dropout = 0.0",
            # Adam turns gradients that are pure rounding into full steps; nearly equal items then swap ranks.
            'OptimizerArgs.optimizer_str = "sgd"',
            "OptimizerArgs.learning_rate = 1.0",
            "DatasetArgs.max_candidate_length = 1",
            "DatasetArgs.max_history_length = 30",  # several tiles of attention, so that costs differ
            f'DatasetArgs.item_to_sid_mapping_path = "item_to_sid.{suffix}"',
            f"TrainerArgs.enable_balanced_shuffler = {balanced}",
            f"TrainerArgs.train_batch_size = {16 // ranks}",
            f"TrainerArgs.eval_batch_size = {8 // ranks}",  # which does not divide the evaluation set
        )
        kept_ranks.train(workspace, *SID_GR, "--gin-config-file", "shop.gin", *settings, ranks=ranks)
        logs.append([line for line in train_log(workspace / suffix) if line["kind"] != "start"])
    reference, lines = logs
    assert [line["kind"] for line in reference] == ["train", "train", "eval"] * 2
    for line, expected in zip(lines, reference, strict=True):
        figures = [figure for figure in ("loss", "NDCG@10", "Recall@10") if figure in expected]
        assert figures
        for figure in figures:
            assert line[figure] == pytest.approx(expected[figure], rel=1e-5)
    balanced = [line for line in lines if line["kind"] == "train"]
    assert sum(step["imbalance_before"] - step["imbalance_after"] for step in balanced) > 0.1


def test_random_data_needs_no_files(tmp_path):
    settings = bind("TrainerArgs.max_train_iters = 2", "TrainerArgs.log_interval = 1")
    random = CONFIGS / "sid_random.gin"
    output = torchrun(tmp_path, *SID_GR, "--gin-config-file", random, *settings, fresh=True)
    assert "step 2  evaluation: HitRate@10" in output
    assert "runs instead" not in output


def test_a_check_takes_another_learning_rate(kept_ranks, tmp_path):
    check = "--check-equal", "5", "--gin-bindings", "OptimizerArgs.learning_rate = 1.0"
    printed = kept_ranks.train(tmp_path, *SID_GR, "--gin-config-file", CONFIGS / "sid_random.gin", *check)
    # With the default, 0.1, rounding hides what weights change by.
    assert "equal: 5 steps, " in printed and "and differs by at most" in printed
    assert list(tmp_path.iterdir()) == []


def test_amazon_data_trains_as_its_configuration_says(kept_ranks, tmp_path):
    data = REPOSITORY.parent / "shared/data/amazon-industrial-sid"
    if not data.exists():
        pytest.skip(f"{data} is absent")
    prepared = tmp_path / "data/amazon-industrial-sid"
    sid_preprocess.main(["--out", str(prepared), "--interactions", str(data / "interactions.jsonl")])
    (prepared / "item_to_sid.json").write_bytes((data / "item_to_sid.json").read_bytes())
    settings = bind("TrainerArgs.max_train_iters = 2", "TrainerArgs.max_eval_iters = 1")
    output = kept_ranks.train(tmp_path, *SID_GR, "--gin-config-file", CONFIGS / "sid_amazon.gin", *settings)
    assert "step 2  evaluation: HitRate@10" in output


@pytest.mark.parametrize(
    ("binding", "error"),
    [
        ("TrainerArgs.top_k_for_generation = 5", "TrainerArgs.eval_metrics = 'NDCG@10': expected k of at"),
        ("DatasetArgs.codebook_sizes = [16, 16]", "DatasetArgs.codebook_sizes = [16, 16]: expected one"),
        ("DatasetArgs.codebook_sizes = [16, 16, 9]", "ValueError: item_to_sid.pt: item"),
        ("NetworkArgs.is_causal = False", "NetworkArgs.is_causal = False: expected True"),
        ('DatasetArgs.dataset_type_str = "sid"', "DatasetArgs.dataset_type_str = 'sid':"),
    ],
)
def test_bad_setting(kept_ranks, workspace, binding, error):
    settings = bind(*SMALL, binding)
    assert error in kept_ranks.refuse(workspace, *SID_GR, "--gin-config-file", "shop.gin", *settings)
