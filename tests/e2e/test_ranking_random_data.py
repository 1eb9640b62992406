from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commons.perf_model import MeasuredCost
from tests.e2e.forked_ranks import forked_ranks
from tests.e2e.gin_files import RANDOM_DATA, RECSYS_EXAMPLES
from tests.e2e.torchrun import RANKING, bind, torchrun

NUM_STEPS = 6


def train(
    directory: Path, gin_text: str, *bindings: str, launch: Callable[..., str] = forked_ranks
) -> tuple[str, list[dict[str, float]]]:
    """What the run printed, and its log: a dict per line."""
    config = directory / "config.gin"
    config.write_text(gin_text)
    output = launch(directory, *RANKING, "--gin-config-file", config, *bind(*bindings))
    log = (directory / "logs/train.jsonl").read_text()
    return output, [json.loads(line) for line in log.splitlines()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of the plain run: no balancing, no overlap."""
    directory = tmp_path_factory.mktemp("reference")
    _, log = train(directory, RANDOM_DATA, 'TrainerArgs.pipeline_type = "none"', launch=torchrun)
    steps = [line for line in log if line["kind"] == "train"]
    assert len(steps) == NUM_STEPS
    assert all(step["imbalance_after"] == step["imbalance_before"] for step in steps)
    return [step["loss"] for step in steps]


@pytest.mark.parametrize(("pipeline", "balanced"), [("none", True), ("native", False), ("native", True)])
def test_every_mode_trains_the_same(tmp_path, reference, pipeline, balanced):
    _, log = train(
        tmp_path,
        RANDOM_DATA,
        f'TrainerArgs.pipeline_type = "{pipeline}"',
        f"TrainerArgs.enable_balanced_shuffler = {balanced}",
    )
    steps = [line for line in log if line["kind"] == "train"]
    assert [step["loss"] for step in steps] == pytest.approx(reference, rel=1e-4)
    assert [line["step"] for line in log if line["kind"] == "eval"] == [3, 6]
    for figure in ("samples_per_second", "tokens_per_second", "tflops"):
        assert all(step[figure] > 0 for step in steps)
    before, after = (sum(step[f"imbalance_{when}"] for step in steps) for when in ("before", "after"))
    assert before > 1.1 * NUM_STEPS
    assert after < 1.1 * NUM_STEPS if balanced else after == before


def test_rows_that_follow_the_load_under_a_limit_of_tokens_train_the_same(tmp_path, reference):
    _, log = train(
        tmp_path,
        RANDOM_DATA,
        "TrainerArgs.enable_balanced_shuffler = True",
        'TrainerArgs.balance_partitioner = "refined"',
        "TrainerArgs.balance_tolerance = 0.001",
        "TrainerArgs.balance_equal_rows = False",
        "TrainerArgs.balance_max_tokens = 10000",
    )
    steps = [line for line in log if line["kind"] == "train"]
    assert [step["loss"] for step in steps] == pytest.approx(reference, rel=1e-4)
    assert sum(step["imbalance_after"] for step in steps) < 1.01 * NUM_STEPS


def test_steps_in_micro_batches_train_the_same_and_long_samples_are_named(tmp_path, reference):
    output, log = train(
        tmp_path,
        RANDOM_DATA,
        "TrainerArgs.enable_balanced_shuffler = True",
        "TrainerArgs.max_tokens_per_micro_batch = 40",
    )
    steps = [line for line in log if line["kind"] == "train"]
    assert [step["loss"] for step in steps] == pytest.approx(reference, rel=1e-4)
    assert all(step["micro_batches"] >= 2 for step in steps)
    assert "micro-batches" in output
    assert "above max_tokens_per_micro_batch=40: it gets a micro-batch of its own" in output


OWN_SHUFFLER = """
from commons.distributed import BatchShuffler, register_batch_shuffler

@register_batch_shuffler("mine")
class MyShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens() ** 2
"""


def test_a_shuffler_of_ones_own_is_named_in_the_gin_file(tmp_path, reference):
    (tmp_path / "my_shuffler.py").write_text(OWN_SHUFFLER)
    settings = ["TrainerArgs.enable_balanced_shuffler = True", 'TrainerArgs.batch_shuffler = "mine"']
    _, log = train(tmp_path, f"import my_shuffler\n{RANDOM_DATA}", *settings)
    steps = [line for line in log if line["kind"] == "train"]
    assert [step["loss"] for step in steps] == pytest.approx(reference, rel=1e-4)
    assert sum(step["imbalance_before"] - step["imbalance_after"] for step in steps) > 0.1 * NUM_STEPS


def test_costs_are_measured_for_a_file_that_names_them_already(tmp_path):
    config = tmp_path / "config.gin"
    settings = (
        "enable_balanced_shuffler = True",
        "single_rank_load = True",
        'balance_cost = "costs/hstu.json"',
    )
    config.write_text(RANDOM_DATA + "".join(f"TrainerArgs.{setting}\n" for setting in settings))
    # Long enough that attention shows in what a step takes, however busy the machine is.
    bindings = bind("history/FeatureArgs.max_sequence_length = 1024", "lengths/RandomDistribution.std = 400")
    measure = ("--calibrate", "costs/hstu.json", "--calibrate-seconds", "1", *bindings)
    output = forked_ranks(tmp_path, *RANKING, "--gin-config-file", config, *measure)
    assert "a step of T tokens per sample" in output
    assert MeasuredCost.load(tmp_path / "costs/hstu.json").median_error < 1
    assert not (tmp_path / "logs").exists()


def test_a_file_of_recsys_examples_runs_with_size_overrides(tmp_path):
    output, log = train(
        tmp_path,
        RECSYS_EXAMPLES,
        "vocabulary = 1000",
        "batch_size = 4",
        "TrainerArgs.max_train_iters = 4",
        "TrainerArgs.log_interval = 2",
        "TrainerArgs.max_eval_iters = 1",
        'TrainerArgs.log_dir = "logs"',
        "history/FeatureArgs.max_sequence_length = 32",
        "NetworkArgs.num_layers = 1",
        "NetworkArgs.hidden_size = 16",
        "NetworkArgs.kv_channels = 8",
        "NetworkArgs.item_embedding_dim = 16",
        "NetworkArgs.contextual_embedding_dim = 16",
    )
    assert [line["kind"] for line in log] == ["start", "train", "train", "eval"]
    assert {"AUC", "AUC_task7"} <= log[-1].keys()
    for setting in (
        'TrainerArgs.pipeline_type = "prefetch"',
        "TrainerArgs.profile",
        'NetworkArgs.kernel_backend = "cutlass"',
        "NetworkArgs.recompute_input_layernorm",
        "NetworkArgs.recompute_input_silu",
        "DynamicEmbeddingArgs",
        "no fused Adam on CPU",
    ):
        assert output.count(setting) == 1, f"expected one warning about {setting}:\n{output}"
