"""Bad settings and failing ranks end every process in time, and the cause is shown once."""

import re
import time

import pytest

from tests.e2e.gin_files import RANDOM_DATA, for_inference
from tests.e2e.torchrun import RANKING, REPOSITORY, bind, python, torchrun

MOVIELENS = REPOSITORY / "hstu/training/configs/movielens_100k_ranking.gin"

CUT = """
TrainerArgs.enable_balanced_shuffler = True
TrainerArgs.balance_split = True
TrainerArgs.balance_equal_rows = False
TrainerArgs.train_batch_size = 2
history/FeatureArgs.max_sequence_length = 512
lengths/RandomDistribution.mean = 128
lengths/RandomDistribution.std = 400
"""


@pytest.fixture
def random_data(tmp_path):
    config = tmp_path / "config.gin"
    config.write_text(RANDOM_DATA)
    return config


@pytest.mark.parametrize(
    ("bindings", "error"),
    [
        (['TrainerArgs.pipeline_type = "nothing"'], "ValueError: TrainerArgs.pipeline_type = 'nothing':"),
        (["NetworkArgs.depth = 3"], "'NetworkArgs' doesn't have a parameter named 'depth'"),
        (
            ['item/EmbeddingArgs.sharding_type = "data_parallel"'],
            "RuntimeError: SparseDistTrainPipeline found no module of the model to pipeline. TorchRec needs",
        ),
        (
            ['TrainerArgs.log_dir = "config.gin/logs"'],
            "OSError: TrainerArgs.log_dir = 'config.gin/logs' cannot be written to: "
            "config.gin/logs: Not a directory",
        ),
    ],
    ids=["pipeline", "gin parameter", "nothing to pipeline", "log folder"],
)
def test_bad_setting(tmp_path, random_data, bindings, error):
    arguments = ("--gin-config-file", random_data, *bind(*bindings))
    assert error in python(tmp_path, *RANKING, *arguments, fails=True)


@pytest.mark.parametrize(
    ("file", "error"),
    [
        (
            MOVIELENS,
            "FileNotFoundError: data/ml-100k/meta.json does not exist; prepare it with: "
            "python -m commons.datasets.movielens_preprocess --dataset ml-100k --out data/ml-100k",
        ),
        ("none.gin", "FileNotFoundError: --gin-config-file none.gin does not exist\n"),
    ],
    ids=["data", "gin file"],
)
def test_missing_file(tmp_path, file, error):
    assert error in python(tmp_path, *RANKING, "--gin-config-file", file, fails=True)


@pytest.mark.parametrize("calibrate", [[], ["--calibrate", "costs.json"]], ids=["train", "calibrate"])
def test_missing_optimizer_error_explains_how_to_train_and_how_to_evaluate(tmp_path, calibrate):
    (tmp_path / "inference.gin").write_text(for_inference(RANDOM_DATA))
    output = python(tmp_path, *RANKING, "--gin-config-file", "inference.gin", *calibrate, fails=True)
    assert "ValueError: OptimizerArgs is not configured, as in a file for inference" in output
    for remedy in ("OptimizerArgs.optimizer_str='adam'", "OptimizerArgs.learning_rate=1e-3", "ckpt_load_dir"):
        assert remedy in output


def test_bad_setting_is_shown_once(tmp_path, random_data):
    settings = ["TrainerArgs.enable_balanced_shuffler = True", 'TrainerArgs.batch_shuffler = "nothing"']
    output = torchrun(tmp_path, *RANKING, "--gin-config-file", random_data, *bind(*settings), fails=True)
    error = "KeyError: \"unknown batch shuffler 'nothing'; registered are ['hstu', 'identity']\""
    assert output.count(error) == 1, output


@pytest.mark.parametrize(
    ("ranks", "failure", "error"),
    [
        (4, "bad_id", "ValueError: feature 'user' has id -1 in row 0; its table has 100 rows"),
        (2, "workloads", "IndexError: a mistake of the user's"),
        (4, "placement", "MemoryError: no memory to place the samples"),
        (2, "forward", "IndexError: a mistake of the user's"),
    ],
)
def test_only_the_rank_that_raises_shows_a_traceback(tmp_path, random_data, ranks, failure, error):
    arguments = ("-m", "tests.e2e.failing_rank", random_data, failure)
    output = torchrun(tmp_path, *arguments, fails=True, ranks=ranks)
    assert output.count(error) == 1, output
    assert_last_rank_failed_alone(output, ranks)


@pytest.mark.parametrize(
    ("part", "ranks"),
    [("loader", 2), ("loader", 4), ("workloads", 4), ("partitioner", 4), ("forward", 2), ("forward", 4)],
)
def test_only_the_rank_that_raises_shows_a_traceback_in_a_program_of_a_users_own(tmp_path, ranks, part):
    program = REPOSITORY / "tests/e2e/plain_program.py"
    # Forked processes end at once; only an interpreter of its own could abort on its way.
    output = torchrun(tmp_path, program, part, fails=True, ranks=ranks, fresh=ranks == 2)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 60
    assert output.count(f"ValueError: the {part} fails") == 1, output
    if part in ("loader", "workloads"):  # the other ranks know at once
        assert f"rank 0 ends, because rank {ranks - 1} raised ValueError, and shows the traceback" in output
    assert_last_rank_failed_alone(output, ranks)


def assert_last_rank_failed_alone(output: str, ranks: int) -> None:
    """Torchrun names the last rank, which raised; each other rank has printed a line, or was ended before."""
    assert_other_ranks_are_silent(output, num_tracebacks=2)
    root_cause = output.split("Root Cause (first observed failure):")[-1]
    assert re.search(rf"rank +: {ranks - 1} ", root_cause), output
    assert re.search(r"exitcode +: 1 ", root_cause), output
    assert "SIGABRT" not in output and "terminate called" not in output, output
    ended = re.findall(r"^rank (\d+) ends, because", output, re.MULTILINE)
    assert sorted(ended) == sorted(set(ended) - {str(ranks - 1)}), output


def test_torchrun_names_the_rank_that_was_killed(tmp_path, random_data):
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", random_data, "killed", fails=True)
    root_cause = output.split("Root Cause (first observed failure):")[-1]
    assert re.search(r"rank +: 1 ", root_cause) and "(SIGKILL)" in root_cause, output
    assert_other_ranks_are_silent(output, num_tracebacks=1)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("fetch_killed", "(SIGKILL)"),
        ("fetch_memory", "MemoryError: no memory"),
        ("fetch_slow", "with ranks [1] of the ranks to balance among"),
    ],
)
def test_all_ranks_end_if_one_fails_in_a_layers_fetch(tmp_path, failure, cause):
    (tmp_path / "config.gin").write_text(RANDOM_DATA + CUT)
    start = time.monotonic()
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", "config.gin", failure, fails=True)
    assert time.monotonic() - start < 60
    assert output.count(cause) >= 1, output
    assert_other_ranks_are_silent(output, num_tracebacks=1 if failure == "fetch_killed" else 2)


def assert_other_ranks_are_silent(output: str, num_tracebacks: int) -> None:
    """No other rank reports the peer it lost. One of the tracebacks is torchrun's own."""
    assert output.count("Traceback (most recent call last)") == num_tracebacks, output
    assert "Connection closed by peer" not in output, output
