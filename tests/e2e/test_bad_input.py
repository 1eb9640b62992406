"""Bad settings and failing ranks end every process in time, and the cause is shown once."""

import json
import re
import time

import pytest

from tests.e2e.gin_files import RANDOM_DATA, for_inference
from tests.e2e.movielens_files import prepare_movielens
from tests.e2e.torchrun import RANKING, REPOSITORY, bind, torchrun
from tests.examples.programs import in_checkout, source

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

FAILING_STEPS = """
def steps():
    yield from range(3)
    if dist.get_rank() == 1:
        open("failed", "w").close()
        raise ValueError("the loader fails")
    yield from range(99)

"""


@pytest.fixture
def random_data(tmp_path):
    config = tmp_path / "config.gin"
    config.write_text(RANDOM_DATA)
    (tmp_path / "inference.gin").write_text(for_inference(RANDOM_DATA))
    return config


@pytest.mark.parametrize(
    ("file", "arguments", "words"),
    [
        (
            "config.gin",
            bind('item/EmbeddingArgs.sharding_type = "data_parallel"'),
            ["found no module of the model to pipeline"],
        ),
        ("none.gin", [], ["--gin-config-file none.gin"]),
        ("inference.gin", [], ["OptimizerArgs is not configured", "ckpt_load_dir"]),
    ],
    ids=["nothing to pipeline", "gin file", "no optimizer"],
)
def test_bad_setting(kept_ranks, tmp_path, random_data, file, arguments, words):
    output = kept_ranks.refuse(tmp_path, *RANKING, "--gin-config-file", file, *arguments)
    assert all(word in output for word in words), output


def test_an_id_outside_its_table_names_the_file_and_how_to_mend_it(kept_ranks, tmp_path):
    prepare_movielens(tmp_path)
    path = tmp_path / "data/ml-100k/meta.json"
    meta = json.loads(path.read_text())
    meta["vocab_sizes"]["movie_id"] = 9
    path.write_text(json.dumps(meta))
    output = kept_ranks.refuse(tmp_path, *RANKING, "--gin-config-file", MOVIELENS)
    assert re.search(r"feature 'movie_id' has id \d+: expected 0 to 8; prepare it again", output), output


def test_bad_setting_is_shown_once(tmp_path, random_data):
    settings = ["TrainerArgs.enable_balanced_shuffler = True", 'TrainerArgs.batch_shuffler = "nothing"']
    output = torchrun(tmp_path, *RANKING, "--gin-config-file", random_data, *bind(*settings), fails=True)
    error = "KeyError: \"unknown batch shuffler 'nothing'; registered are ['hstu', 'identity']\""
    assert output.count(error) == 1, output


@pytest.mark.parametrize("failure", ["workloads", "forward"])
def test_only_the_rank_that_raises_shows_a_traceback(tmp_path, failure):
    (tmp_path / "config.gin").write_text(RANDOM_DATA + "TrainerArgs.enable_balanced_shuffler = True\n")
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", "config.gin", failure, fails=True)
    assert output.count("IndexError: a mistake of the user's") == 1, output
    assert_last_rank_failed_alone(output)


def test_only_the_rank_that_raises_shows_a_traceback_in_a_users_program(tmp_path):
    program = in_checkout(source("own_torchrec_model")).replace("range(10)", "steps()")
    (tmp_path / "program.py").write_text(program.replace("\nif __name__", f"{FAILING_STEPS}\nif __name__"))
    # Only what ends as an interpreter does could abort on its way.
    output = torchrun(tmp_path, "program.py", fails=True, fresh=True)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 60
    assert output.count("ValueError: the loader fails") == 1, output
    # The other ranks know at once.
    assert "rank 0 ends, because rank 1 raised ValueError, and shows the traceback" in output
    assert_last_rank_failed_alone(output)


def assert_last_rank_failed_alone(output: str) -> None:
    """Torchrun names the last rank, which raised; the other has printed a line, or was ended before."""
    assert_other_ranks_are_silent(output)
    root_cause = output.split("Root Cause (first observed failure):")[-1]
    assert re.search(r"rank +: 1 ", root_cause) and re.search(r"exitcode +: 1 ", root_cause), output
    assert "SIGABRT" not in output and "terminate called" not in output, output
    assert "rank 1 ends, because" not in output, output


def test_all_ranks_end_if_one_is_slow_in_a_layers_fetch(tmp_path):
    (tmp_path / "config.gin").write_text(RANDOM_DATA + CUT)
    start = time.monotonic()
    output = torchrun(tmp_path, "-m", "tests.e2e.failing_rank", "config.gin", "fetch_slow", fails=True)
    assert time.monotonic() - start < 60
    assert "with ranks [1] of the ranks to balance among" in output, output
    assert_other_ranks_are_silent(output)


def assert_other_ranks_are_silent(output: str) -> None:
    """No other rank reports the peer it lost. One of two tracebacks is torchrun's own."""
    assert output.count("Traceback (most recent call last)") == 2, output
    assert "Connection closed by peer" not in output, output
