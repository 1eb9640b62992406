"""Every process ends in time, and what went wrong is shown once."""

from __future__ import annotations

import re

import pytest

from tests.e2e.gin_files import RANDOM_DATA, for_inference
from tests.e2e.refused_runs import refusals
from tests.e2e.torchrun import RANKING, REPOSITORY, bind, torchrun

MOVIELENS = REPOSITORY / "hstu/training/configs/movielens_100k_ranking.gin"
REGISTERED_SHUFFLERS = "registered are ['hstu', 'identity']"
REGISTERED_PIPELINES = "registered are ['native', 'none', 'prefetch']"


@pytest.fixture
def random_data(tmp_path):
    config = tmp_path / "config.gin"
    config.write_text(RANDOM_DATA)
    return config


# By name what a gin file is overridden by, and the error.
REFUSED = {
    "shuffler": (
        ["TrainerArgs.enable_balanced_shuffler = True", 'TrainerArgs.batch_shuffler = "nothing"'],
        f"KeyError: \"unknown batch shuffler 'nothing'; {REGISTERED_SHUFFLERS}\"",
    ),
    "pipeline": (
        ['TrainerArgs.pipeline_type = "nothing"'],
        f"KeyError: \"unknown train pipeline 'nothing'; {REGISTERED_PIPELINES}\"",
    ),
    "gin parameter": (["NetworkArgs.depth = 3"], "'NetworkArgs' doesn't have a parameter named 'depth'"),
    "tensor parallelism": (
        ["TensorModelParallelArgs.tensor_model_parallel_size = 2"],
        "ValueError: TensorModelParallelArgs.tensor_model_parallel_size = 2: expected 1",
    ),
    "batch size": (
        ["TrainerArgs.train_batch_size = 0"],
        "ValueError: TrainerArgs.train_batch_size = 0: expected an integer of at least 1",
    ),
    "nothing to pipeline": (
        ['item/EmbeddingArgs.sharding_type = "data_parallel"'],
        'RuntimeError: pipeline "native" found no module of the model to pipeline. TorchRec needs',
    ),
}
# The same of a file that names a dataset on disk.
REFUSED_DATASETS = {
    "history length": (
        ["DatasetArgs.max_history_seqlen = 0"],
        "ValueError: DatasetArgs.max_history_seqlen = 0: expected an integer of at least 1",
    ),
    "missing data": (
        [],
        "FileNotFoundError: data/ml-100k/meta.json does not exist; prepare it with: "
        "python -m commons.datasets.movielens_preprocess --dataset ml-100k --out data/ml-100k",
    ),
}


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """By name what each of these runs raised."""
    directory = tmp_path_factory.mktemp("refused")
    config = directory / "config.gin"
    config.write_text(RANDOM_DATA)
    runs = {
        name: ["--gin-config-file", str(file), *bind(*bindings)]
        for file, refused in ((config, REFUSED), (MOVIELENS, REFUSED_DATASETS))
        for name, (bindings, _) in refused.items()
    }
    runs["gin file"] = ["--gin-config-file", "none.gin"]
    (directory / "inference.gin").write_text(for_inference(RANDOM_DATA))
    runs["no optimizer"] = ["--gin-config-file", "inference.gin"]
    runs["no optimizer to calibrate"] = [*runs["no optimizer"], "--calibrate", "costs.json"]
    return refusals(directory, RANKING[1], runs)


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_DATASETS])
def test_bad_setting(raised, name):
    _, error = {**REFUSED, **REFUSED_DATASETS}[name]
    assert error in raised[name]


def test_a_gin_file_that_is_not_there_is_named(raised):
    assert raised["gin file"] == "FileNotFoundError: --gin-config-file none.gin does not exist\n"


@pytest.mark.parametrize("name", ["no optimizer", "no optimizer to calibrate"])
def test_a_file_without_an_optimizer_says_how_to_train_and_how_to_evaluate(raised, name):
    assert raised[name].startswith("ValueError: OptimizerArgs is not configured, as in a file for inference")
    for remedy in ("OptimizerArgs.optimizer_str='adam'", "OptimizerArgs.learning_rate=1e-3", "ckpt_load_dir"):
        assert remedy in raised[name]


def test_a_bad_setting_is_shown_once(tmp_path, random_data):
    bindings, error = REFUSED["shuffler"]
    output = torchrun(tmp_path, *RANKING, "--gin-config-file", random_data, *bind(*bindings), fails=True)
    assert output.count(error) == 1, output


def test_one_rank_raises_in_training(tmp_path, random_data):
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", random_data, "bad_id", fails=True)
    assert output.count("ValueError: feature 'user' has id -1 in row 0; its table has 100 rows") == 1, output
    assert_other_ranks_are_silent(output, num_tracebacks=2)


def test_one_rank_fails_to_place_what_the_others_have_placed(tmp_path, random_data):
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", random_data, "placement", fails=True)
    assert output.count("MemoryError: no memory to place the samples") == 1, output
    assert_other_ranks_are_silent(output, num_tracebacks=2)


def test_one_rank_is_killed_in_training(tmp_path, random_data):
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", random_data, "killed", fails=True)
    root_cause = output.split("Root Cause (first observed failure):")[-1]
    assert re.search(r"rank +: 1 ", root_cause) and "(SIGKILL)" in root_cause, output
    assert_other_ranks_are_silent(output, num_tracebacks=1)


def assert_other_ranks_are_silent(output: str, num_tracebacks: int) -> None:
    """None shows that it lost a peer; of the tracebacks, torchrun's own is one."""
    assert output.count("Traceback (most recent call last)") == num_tracebacks, output
    assert "Connection closed by peer" not in output, output
