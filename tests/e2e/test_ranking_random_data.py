"""The ranking model trains and evaluates the same in every mode, on random data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.gin_files import RANDOM_DATA
from tests.e2e.torchrun import RANKING, bind, torchrun, train_log

NUM_STEPS = 6
LONG_HISTORIES = (
    "TrainerArgs.train_batch_size = 2",
    "history/FeatureArgs.max_sequence_length = 512",
    "lengths/RandomDistribution.mean = 128",
    "lengths/RandomDistribution.std = 400",
)
BALANCED = ("TrainerArgs.enable_balanced_shuffler = True", "TrainerArgs.balance_equal_rows = False")
IN_MICRO_BATCHES = (
    *BALANCED,
    'TrainerArgs.balance_partitioner = "refined"',
    "TrainerArgs.max_tokens_per_micro_batch = 100",
)
IN_PIECES = (*BALANCED, "TrainerArgs.balance_split = True")


def run(start: Callable[..., str], directory: Path, *settings: str) -> tuple[str, dict[str, list[dict]]]:
    """Returns the output of a run, and the lines of its log by kind."""
    directory.mkdir()
    (directory / "config.gin").write_text(RANDOM_DATA)
    output = start(directory, *RANKING, "--gin-config-file", "config.gin", *bind(*LONG_HISTORIES, *settings))
    log = train_log(directory / "logs")
    return output, {kind: [of for of in log if of["kind"] == kind] for kind in ("train", "eval")}


def test_every_mode_trains_and_evaluates_the_same(kept_ranks, tmp_path):
    def as_users_start_it(*arguments: str | Path) -> str:
        return torchrun(*arguments, fresh=True)

    _, plain = run(as_users_start_it, tmp_path / "plain", 'TrainerArgs.pipeline_type = "none"')
    assert [line["step"] for line in plain["eval"]] == [3, 6] and len(plain["train"]) == NUM_STEPS
    assert all(step["imbalance_after"] == step["imbalance_before"] for step in plain["train"])
    outputs, logs = zip(
        run(kept_ranks.train, tmp_path / "micro-batches", *IN_MICRO_BATCHES),
        run(kept_ranks.train, tmp_path / "pieces", *IN_PIECES),
        strict=True,
    )
    for log in logs:
        assert [step["loss"] for step in log["train"]] == pytest.approx(
            [step["loss"] for step in plain["train"]], rel=1e-4
        )
        for line, expected in zip(log["eval"], plain["eval"], strict=True):
            assert {**line, "kind": 0} == pytest.approx({**expected, "kind": 0}, rel=1e-3)
        for figure in ("samples_per_second", "tokens_per_second", "tflops"):
            assert all(step[figure] > 0 for step in log["train"])
    micro, pieces = (log["train"] for log in logs)
    before, whole, cut = (
        sum(step[f"imbalance_{when}"] for step in of)
        for of, when in ((plain["train"], "before"), (micro, "after"), (pieces, "after"))
    )
    assert cut < whole < before and sum(step["samples_cut"] for step in pieces) > 0
    assert max(step["micro_batches"] for step in micro) >= 2 > max(step["micro_batches"] for step in pieces)
    assert "above MicroBatches.max_tokens=100: it gets a micro-batch of its own" in outputs[0]
    assert "pieces, fetch" in outputs[1]
