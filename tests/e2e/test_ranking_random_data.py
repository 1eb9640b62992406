"""The ranking model trains the same in every mode, on random data."""

from pathlib import Path

import pytest

from commons.perf_model import Cost
from tests.e2e.gin_files import RANDOM_DATA
from tests.e2e.torchrun import RANKING, bind, torchrun, train_log

NUM_STEPS = 6
BALANCED = "TrainerArgs.enable_balanced_shuffler = True"


def train(directory: Path, gin_text: str, *bindings: str, fresh: bool = False) -> tuple[str, list[dict]]:
    """Returns the output of a run, and its log."""
    (directory / "config.gin").write_text(gin_text)
    arguments = (*RANKING, "--gin-config-file", "config.gin", *bind(*bindings))
    return torchrun(directory, *arguments, fresh=fresh), train_log(directory / "logs")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Returns the losses of a run without balancing and overlap, started as users start it."""
    directory = tmp_path_factory.mktemp("reference")
    _, log = train(directory, RANDOM_DATA, 'TrainerArgs.pipeline_type = "none"', fresh=True)
    steps = [line for line in log if line["kind"] == "train"]
    assert len(steps) == NUM_STEPS
    assert all(step["imbalance_after"] == step["imbalance_before"] for step in steps)
    return [step["loss"] for step in steps]


@pytest.mark.parametrize(
    ("settings", "imbalance"),
    [
        ([BALANCED, 'TrainerArgs.pipeline_type = "none"'], 1.1),
        (['TrainerArgs.pipeline_type = "native"'], None),
        ([BALANCED, "TrainerArgs.max_tokens_per_micro_batch = 40"], 1.1),
        (
            [
                BALANCED,
                'TrainerArgs.balance_partitioner = "refined"',
                "TrainerArgs.balance_tolerance = 0.001",
                "TrainerArgs.balance_equal_rows = False",
                "TrainerArgs.balance_max_tokens = 10000",
            ],
            1.01,
        ),
    ],
    ids=[
        "none, balanced",
        "native",
        "micro-batches",
        "rows follow the load",
    ],
)
def test_every_mode_trains_the_same(tmp_path, reference, settings, imbalance):
    output, log = train(tmp_path, RANDOM_DATA, *settings)
    steps = [line for line in log if line["kind"] == "train"]
    assert [step["loss"] for step in steps] == pytest.approx(reference, rel=1e-4)
    assert [line["step"] for line in log if line["kind"] == "eval"] == [3, 6]
    for figure in ("samples_per_second", "tokens_per_second", "tflops"):
        assert all(step[figure] > 0 for step in steps)
    before, after = (sum(step[f"imbalance_{when}"] for step in steps) for when in ("before", "after"))
    assert before > 1.1 * NUM_STEPS
    assert after == before if imbalance is None else after < imbalance * NUM_STEPS
    in_micro_batches = "max_tokens_per_micro_batch" in settings[-1]
    assert {step["micro_batches"] >= 2 for step in steps} == {in_micro_batches}
    long_sample = "above MicroBatches.max_tokens=40: it gets a micro-batch of its own"
    assert (long_sample in output) == ("micro-batches" in output) == in_micro_batches


def test_cut_samples_train_and_evaluate_the_same(tmp_path):
    long_histories = (
        "TrainerArgs.train_batch_size = 2",
        "history/FeatureArgs.max_sequence_length = 512",
        "lengths/RandomDistribution.mean = 128",
        "lengths/RandomDistribution.std = 400",
    )
    logs = []
    for split in (False, True):
        directory = tmp_path / str(split)
        directory.mkdir()
        settings = (f"TrainerArgs.balance_split = {split}", "TrainerArgs.balance_equal_rows = False")
        output, log = train(directory, RANDOM_DATA, BALANCED, *settings, *long_histories)
        logs.append(log)
    whole, cut = ([line for line in log if line["kind"] == "train"] for log in logs)
    assert [step["loss"] for step in cut] == pytest.approx([step["loss"] for step in whole], rel=1e-4)
    assert sum(step["samples_cut"] for step in cut) > 0
    assert sum(step["imbalance_after"] for step in cut) < sum(step["imbalance_after"] for step in whole)
    assert "pieces, fetch" in output
    whole_evaluations, cut_evaluations = (
        [line for line in log if line.pop("kind") == "eval"] for log in logs
    )
    assert len(whole_evaluations) == 2
    for line, expected in zip(cut_evaluations, whole_evaluations, strict=True):
        assert line == pytest.approx(expected, rel=1e-3)


def test_costs_are_measured_for_a_file_that_already_names_them(tmp_path):
    settings = (
        "enable_balanced_shuffler = True",
        "single_rank_load = True",
        'balance_cost = "costs/hstu.json"',
    )
    (tmp_path / "config.gin").write_text(RANDOM_DATA + "".join(f"TrainerArgs.{s}\n" for s in settings))
    # Long enough that attention dominates a step's time, however busy the machine is.
    bindings = bind("history/FeatureArgs.max_sequence_length = 1024", "lengths/RandomDistribution.std = 400")
    measure = ("--calibrate", "costs/hstu.json", "--calibrate-seconds", "1", *bindings)
    output = torchrun(tmp_path, *RANKING, "--gin-config-file", "config.gin", *measure)
    assert "for each sample of T tokens and workloads w" in output
    assert Cost.load(tmp_path / "costs/hstu.json").median_error < 1
    assert not (tmp_path / "logs").exists()
