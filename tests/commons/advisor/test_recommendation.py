from dataclasses import fields

import numpy as np
import pytest

from commons.distributed import ShufflerSettings
from commons.extensions.pieces import Pieces
from commons.perf_model import Cost
from commons.training import TrainerArgs
from tests.commons.advisor.command import MODEL, advise, by_name, heavy_tailed
from tests.commons.advisor.internals import strategies
from tests.commons.training.small_task import trainer_args


def changed(trainer: TrainerArgs) -> dict[str, object]:
    """The `balance_*` settings that differ from their defaults."""
    return {
        spec.name.removeprefix("balance_"): getattr(trainer, spec.name)
        for spec in fields(TrainerArgs)
        if spec.name.startswith("balance_") and getattr(trainer, spec.name) != spec.default
    }


@pytest.mark.parametrize(
    ("lengths", "arguments"),
    [
        (np.full(600, 50), ["--ranks", "4"]),
        (np.zeros(600, dtype=np.int64), ["--ranks", "4", "--extra-tokens", "0"]),
        (heavy_tailed(600), ["--ranks", "1"]),
    ],
    ids=["one length", "nothing to compute", "one rank"],
)
def test_nothing_to_gain(lengths, arguments, tmp_path):
    (case,) = advise(tmp_path, lengths, *arguments)["cases"]
    assert case["recommendation"]["strategy"] is None
    assert case["recommendation"]["gin"] == case["recommendation"]["notes"] == []
    for strategy in case["strategies"]:
        assert strategy["imbalance"] == strategy["speedup"] == 1
        assert strategy["share_of_samples_moved"] == strategy["samples_cut"] == strategy["fetch_seconds"] == 0
    assert (by_name(case).keys() == {"as_loaded"}) == ("1" in arguments)


def test_the_default_is_recommended_with_a_note_where_karmarkar_karp_is_as_good(tmp_path):
    (case,) = advise(tmp_path, heavy_tailed(6000), "--rows-per-rank", "64")["cases"]
    assert case["recommendation"]["strategy"] == "rebalance"
    assert by_name(case)["rebalance"]["speedup"] > by_name(case)["karmarkar_karp"]["speedup"] + 0.05
    assert not any("Karmarkar" in note for note in case["recommendation"]["notes"])
    (case,) = advise(tmp_path, np.random.default_rng(0).integers(1, 201, 3000))["cases"]
    assert case["recommendation"]["strategy"] == "rebalance"
    usual, default = (by_name(case)[name] for name in ("karmarkar_karp", "rebalance"))
    assert default["share_of_samples_moved"] < 0.5 * usual["share_of_samples_moved"]
    assert any("Karmarkar" in note for note in case["recommendation"]["notes"])


def test_the_lines_to_paste_are_valid(tmp_path):
    (case,) = advise(tmp_path, heavy_tailed(1000), "--ranks", "4")["cases"]
    expected = {
        "as_loaded": {},
        "karmarkar_karp": {"partitioner": "karmarkar_karp"},
        "refined": {"partitioner": "refined"},
        "rebalance": {},
        "pieces": {"partitioner": "refined", "equal_rows": False, "split": True},
    }
    assert by_name(case).keys() == expected.keys()
    for name, strategy in by_name(case).items():
        trainer = trainer_args(strategy["gin"])
        assert trainer.enable_balanced_shuffler == (name != "as_loaded")
        assert changed(trainer) == expected[name]
        # Nothing is to be set that has its default.
        assert len(strategy["gin"]) == (name != "as_loaded") + len(expected[name])
        if name != "as_loaded":
            given = strategy["python"].removeprefix("batch_shuffler=")
            made = eval(given, {"MyShuffler": dict, "Pieces": Pieces})
            extensions = [type(extension) for extension in made.pop("extensions", [])]
            assert ("split" in expected[name]) == (extensions == [Pieces])
            assert made == {setting: of for setting, of in expected[name].items() if setting != "split"}


@pytest.mark.parametrize(
    "present",
    [
        {"balance_partitioner": "longest_processing_time"},
        {"enable_balanced_shuffler": True, "balance_equal_rows": False, "balance_split": True},
        {"enable_balanced_shuffler": True},
        {"max_tokens_per_micro_batch": 64},
        {"balance_group_feature": "user"},
        {"balance_cost": "learned", "balance_speed_limit": 3.0},
    ],
)
def test_lines_undo_what_the_gin_file_has(present, tmp_path):
    Cost((1.0, 1.0, 1.0)).save(tmp_path / "cost.json")
    file = [f"TrainerArgs.{name} = {value!r}" for name, value in present.items()]
    for strategy in strategies(str(tmp_path / "cost.json") if "balance_cost" in present else None)[1:]:
        lines = strategy.gin_lines(present)
        trainer = trainer_args([*file, *lines])
        assert trainer.enable_balanced_shuffler
        settings = changed(trainer)
        assert settings.pop("split", False) == strategy.cuts_samples
        settings.pop("group_feature", None)  # which suits the strategy, or would have raised
        assert settings.pop("cost", None) == strategy.balance_cost
        assert ShufflerSettings(**settings) == strategy.settings
        assert not set(lines) & set(file)


def test_giants_need_pieces_and_a_network_that_is_fast(tmp_path):
    lengths = np.full(3000, 20)
    lengths[::100] = 4000
    slow_devices = ["--tflops", "0.01", "--bandwidth"]
    runs = ([], [*slow_devices, "1"], [*slow_devices, "0.0001"], ["--ranks-per-node", "8"])
    ratios, fast, slow, in_node = (
        advise(tmp_path, lengths, "--rows-per-rank", "8", *run)["cases"][0] for run in runs
    )
    assert ratios["lower_bound"] > 1.5
    assert "balance_split = True" in " ".join(ratios["recommendation"]["notes"])
    assert fast["recommendation"]["strategy"] == "pieces" != slow["recommendation"]["strategy"]
    expected = {"partitioner": "refined", "equal_rows": False, "split": True}
    assert changed(trainer_args(fast["recommendation"]["gin"])) == expected
    assert any("pay off below" in note for note in slow["recommendation"]["notes"])
    assert by_name(in_node)["pieces"]["fetch_seconds"] == 0
    assert in_node["recommendation"]["strategy"] == "pieces"


def test_a_strategy_on_measured_times_trains_on_them(tmp_path):
    Cost((1e5, 1e3, 0.1, 0.1), per_step=1e7).save(tmp_path / "cost.json")
    file = str(tmp_path / "cost.json")
    model = [*MODEL, "--cost", file]
    report = advise(tmp_path, heavy_tailed(1000), "--ranks", "4", model=model)
    (case,) = report["cases"]
    rebalance = by_name(case)["rebalance"]
    assert changed(trainer_args(rebalance["gin"])) == {"cost": file}
    assert rebalance["python"] == f"batch_shuffler=MyShuffler(cost=Cost.load({file!r}))"
    assert report["load_unit"] == "predicted ns"
    assert by_name(case)["pieces"]["imbalance"] < by_name(case)["refined"]["imbalance"]
