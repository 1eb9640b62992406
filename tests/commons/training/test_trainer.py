from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commons.datasets import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs, RandomSource, SequenceDataset
from commons.training import (
    EvaluationMetrics,
    OptimizerArgs,
    RankingMetrics,
    TensorModelParallelArgs,
    TrainerArgs,
    train,
)
from commons.training.run_record import RunRecord
from hstu import batch_shuffler  # noqa: F401
from hstu.models.ranking import RankingOutput
from tests.commons.training.small_task import small_task
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, Sample, hstu_batch, ranking_model


class CountedLabels(EvaluationMetrics):
    """How many labels an evaluation saw."""

    def __init__(self) -> None:
        self._labels = 0

    def update(self, output: RankingOutput) -> None:
        self._labels += len(output.labels)

    def compute(self) -> dict[str, float]:
        labels = torch.tensor(self._labels)
        dist.all_reduce(labels)
        self._labels = 0
        return {"labels": float(labels)}


def _dataset(num_samples: int, single_rank: bool) -> SequenceDataset:
    def table(name: str, rows: int, sharding_type: str) -> EmbeddingArgs:
        return EmbeddingArgs([name], f"{name}_table", rows, sharding_type)

    args = BenchmarkDatasetArgs(
        feature_args=[
            FeatureArgs(["item", "action"], 12, is_jagged=True),
            FeatureArgs(["user"], 1),
            FeatureArgs(["tags"], 3, is_jagged=True),
        ],
        embedding_args=[
            table("item", VOCABULARY, "model_parallel"),
            table("tags", VOCABULARY, "model_parallel"),
            table("user", VOCABULARY, "data_parallel"),
            table("action", NUM_CLASSES, "data_parallel"),
        ],
        item_feature_name="item",
        contextual_feature_names=["user", "tags"],
        action_feature_name="action",
    )
    return SequenceDataset(
        RandomSource(args, num_samples, 3),
        4,
        dist.get_rank(),
        dist.get_world_size(),
        single_rank=single_rank,
    )


def _train(log_dir: str, **settings) -> tuple[list[dict[str, float]], list[float]]:
    single_rank = settings.get("single_rank_load", False)
    task = small_task(ranking_model(), _dataset(27, single_rank), _dataset(13, single_rank), CountedLabels())
    args = TrainerArgs(train_batch_size=4, log_interval=2, log_dir=log_dir, **settings)
    evaluations = train(task, args, OptimizerArgs("sgd", 0.05), torch.device("cpu"))
    log = Path(log_dir) / "train.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if dist.get_rank() == 0 else []
    return evaluations, [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("pipeline_type", ["none", "native"])
@pytest.mark.parametrize("balanced", [False, True])
def test_evaluating_in_between_does_not_change_training(pools, tmp_path, pipeline_type, balanced):
    settings = {
        "max_train_iters": 8,  # two epochs of four steps
        "pipeline_type": pipeline_type,
        "enable_balanced_shuffler": balanced,
    }
    often, never = (
        pools(2).run(partial(_train, str(tmp_path / str(interval)), eval_interval=interval, **settings))[0]
        for interval in (3, 100)
    )
    assert often[1] == never[1] and len(often[1]) == 4
    assert len(often[0]) == 3 and len(never[0]) == 1
    assert all(evaluation == never[0][0] for evaluation in often[0])


def test_every_evaluation_label_counts_once_on_any_number_of_ranks(pools, tmp_path):
    counts = {
        ranks: pools(ranks).run(partial(_train, str(tmp_path / str(ranks)), enable_balanced_shuffler=True))[
            0
        ][0]
        for ranks in (2, 3)
    }
    assert counts[2] == counts[3]


@pytest.mark.parametrize("settings", [{}, {"pipeline_type": "prefetch"}, {"balance_equal_rows": False}])
def test_one_rank_that_loads_for_all_trains_the_same(pools, tmp_path, settings):
    every, single = (
        pools(2).run(
            partial(
                _train,
                str(tmp_path / str(single_rank_load)),
                enable_balanced_shuffler=True,
                balance_verify=True,
                single_rank_load=single_rank_load,
                **settings,
            )
        )[0]
        for single_rank_load in (False, True)
    )
    assert every[1] == pytest.approx(single[1], rel=1e-5)
    assert every[0] == single[0]  # evaluation sees all labels, too


def test_tensorboard_has_what_the_json_lines_have(pools, tmp_path):
    settings = {"max_train_iters": 4, "peak_tflops": 0.1, "enable_balanced_shuffler": True}
    pools(2).run(partial(_train, str(tmp_path), **settings))
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for line in (line for line in lines if line["kind"] in ("train", "eval")):
        for name, value in line.items():
            if name in ("kind", "step"):
                continue
            expected = {name: value}
            if isinstance(value, list):
                assert len(value) == 2
                expected = {f"{name}/largest": max(value), f"{name}/mean": sum(value) / 2}
            for tag, number in expected.items():
                shown = {event.step: event.value for event in events.Scalars(f"{line['kind']}/{tag}")}
                assert shown[line["step"]] == pytest.approx(number)
    assert {line["kind"] for line in lines} == {"start", "train", "eval"}
    figures = lines[1]
    assert 0 < figures["mfu"] == pytest.approx(figures["tflops"] / 0.2)
    assert min(figures["compute_ms"]) > 0 <= min(figures["waiting_ms"]) and min(figures["peak_memory_mb"]) > 1


def _write_record(folder: str, first_step: int, losses: list[float]) -> None:
    with RunRecord(Path(folder), 9, first_step) as record:
        for step, loss in enumerate(losses, first_step + 1):
            record.write("train", step, {"loss": loss})


def test_steps_that_are_computed_again_replace_those_of_before_in_tensorboard(pools, tmp_path):
    pools(2).run(partial(_write_record, str(tmp_path), 0, [1.0, 2.0, 3.0, 4.0]))
    pools(2).run(partial(_write_record, str(tmp_path), 2, [30.0]))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("pipeline_type", ["none", "native"])
def test_training_in_micro_batches_is_the_same(pools, tmp_path, pipeline_type, balanced):
    whole, divided = (
        pools(2).run(
            partial(
                _train,
                str(tmp_path / str(cap)),
                pipeline_type=pipeline_type,
                enable_balanced_shuffler=balanced,
                max_tokens_per_micro_batch=cap,
            )
        )[0]
        for cap in (None, 30)
    )
    assert divided[1] == pytest.approx(whole[1], rel=1e-5)
    assert divided[0] == whole[0]


def test_windows_see_all_labels_and_other_steps(pools, tmp_path):
    one, two = (
        pools(2).run(
            partial(
                _train,
                str(tmp_path / str(window)),
                enable_balanced_shuffler=True,
                balance_verify=True,
                balance_window=window,
            )
        )[0]
        for window in (1, 2)
    )
    assert one[0] == two[0] and len(one[1]) == len(two[1])
    assert one[1] != two[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TrainerArgs(train_batch_size=1, single_rank_load=True),
            "TrainerArgs.single_rank_load = True: expected False without enable_balanced_shuffler",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, balance_exchange="post"),
            "TrainerArgs.balance_exchange = 'post': expected one of all_gather, all_to_all",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, balance_window=2, balance_window_max_step_ratio=0.5),
            "TrainerArgs.balance_window_max_step_ratio = 0.5: expected at least 1",
        ),
        (
            lambda: TrainerArgs(train_batch_size=0),
            "TrainerArgs.train_batch_size = 0: expected an integer of at least 1",
        ),
        (
            lambda: TrainerArgs(train_batch_size="8"),
            "TrainerArgs.train_batch_size = '8': expected an integer",
        ),
        (lambda: TrainerArgs(train_batch_size=1, log_interval=0), "TrainerArgs.log_interval = 0"),
        (lambda: TrainerArgs(train_batch_size=1, max_train_iters=0), "TrainerArgs.max_train_iters = 0"),
        (
            lambda: TrainerArgs(train_batch_size=1, balance_partitioner="best"),
            "TrainerArgs.balance_partitioner = 'best': expected one of karmarkar_karp",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, balance_tolerance=-0.1),
            "TrainerArgs.balance_tolerance = -0.1: expected a finite number",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, balance_max_tokens=0),
            "TrainerArgs.balance_max_tokens = 0: expected an integer of at least 1",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, max_tokens_per_micro_batch=0),
            "TrainerArgs.max_tokens_per_micro_batch = 0: expected an integer of at least 1",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, max_tokens_per_micro_batch=2.5),
            "TrainerArgs.max_tokens_per_micro_batch = 2.5: expected an integer",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, small_micro_batches_at_ends=True),
            "small_micro_batches_at_ends = True: expected False without max_tokens_per_micro_batch",
        ),
        (
            lambda: TrainerArgs(train_batch_size=1, peak_tflops=0.0),
            "TrainerArgs.peak_tflops = 0.0: expected a number above 0",
        ),
        (lambda: OptimizerArgs("lion", 0.1), "OptimizerArgs.optimizer_str = 'lion': expected one of adam"),
        (lambda: OptimizerArgs("sgd", -1), "OptimizerArgs.learning_rate = -1"),
        (lambda: TensorModelParallelArgs(2), "tensor_model_parallel_size = 2: expected 1"),
    ],
)
def test_a_bad_setting_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_of_a_shuffler_that_is_off_are_said_to_have_no_effect():
    args = TrainerArgs(train_batch_size=1, batch_shuffler="mine", balance_tolerance=0.1)
    lines = args.settings_without_effect()
    assert [line.split(" = ")[0] for line in lines] == [
        "TrainerArgs.batch_shuffler",
        "TrainerArgs.balance_tolerance",
    ]
    on = TrainerArgs(train_batch_size=1, enable_balanced_shuffler=True, balance_tolerance=0.1)
    assert on.settings_without_effect() == []
    assert on.balance_settings == {"tolerance": 0.1}


def _tokens_in_micro_batches(**settings) -> list[list[int]]:
    """For each micro-batch the tokens of its samples, planned by the shuffler that settings ask for."""
    task = small_task(None, None, None, None)
    args = TrainerArgs(train_batch_size=1, **settings)
    assert args.settings_without_effect() == []
    rows = [Sample([], [], [1] * items, [1] * items, 0, [1] * items) for items in (3, 9, 4, 9, 8, 1, 5)]
    plan = task.make_shuffler(args).plan(hstu_batch(rows))
    return [plan.tokens[numbers].tolist() for of_rank in plan.micro_batches for numbers in of_rank]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_balanced_shuffler": True},
        {"enable_balanced_shuffler": True, "batch_shuffler": "identity"},
    ],
    ids=["none", "the model's", "another"],
)
def test_any_shuffler_gets_the_settings_of_micro_batches(settings):
    assert _tokens_in_micro_batches(**settings) == []
    ascending = _tokens_in_micro_batches(max_tokens_per_micro_batch=20, **settings)
    assert sorted(tokens for of_one in ascending for tokens in of_one) == [2, 6, 8, 10, 16, 18, 18]
    assert max(map(sum, ascending)) <= 20
    at_ends = _tokens_in_micro_batches(
        max_tokens_per_micro_batch=20, small_micro_batches_at_ends=True, **settings
    )
    assert at_ends == [*ascending[::2], *ascending[1::2][::-1]] != ascending


def _aucs_of_two_ranks() -> dict[str, float]:
    """Three tasks: each rank sees one class of the first, all ranks one of the second, both of the third."""
    metrics = RankingMetrics(3, positive_class=0, device=torch.device("cpu"))
    labels = torch.tensor([[0b100, 0b100, 0b000], [0b101, 0b001, 0b001]][dist.get_rank()])
    logits = torch.tensor([[-1.0, 0, 2], [-2, 1, 1], [-3, 2, 3]]) + 4 * dist.get_rank()
    metrics.update(RankingOutput(logits, labels))
    figures = metrics.compute()
    assert metrics._aucs[0].update_called is False  # a fresh start
    return figures


def test_a_task_of_one_class_has_no_auc_and_no_part_of_the_mean(pools):
    for figures in pools(2).run(_aucs_of_two_ranks):
        assert figures["AUC_task0"] == 1.0
        assert np.isnan(figures["AUC_task1"])
        assert figures["AUC_task2"] == pytest.approx(2 / 9)
        assert figures["AUC"] == pytest.approx((1 + 2 / 9) / 2)


def test_what_is_no_number_is_null_in_the_lines(pools, tmp_path):
    pools(2).run(_write_nan, str(tmp_path))
    (line,) = (tmp_path / "train.jsonl").read_text().splitlines()
    assert line == '{"kind": "eval", "step": 3, "AUC": 0.5, "AUC_task1": null}'


def _write_nan(folder: str) -> None:
    with RunRecord(Path(folder), 3, 0) as record:
        record.write("eval", 3, {"AUC": 0.5, "AUC_task1": float("nan")})


def test_auc_of_ratings_and_of_tasks():
    logits = torch.tensor([[4.0, 0, 0], [0, 6.0, 0], [0, 0, 5.0], [0, 5.0, 0]])
    classes = RankingMetrics(1, positive_class=2, device=torch.device("cpu"))
    classes.update(RankingOutput(logits, torch.tensor([0, 1, 2, 2])))
    # Of the 2 × 2 pairs of a positive and a negative, the last positive scores above one negative only.
    assert classes.compute()["AUC"] == pytest.approx(0.75)
    tasks = RankingMetrics(2, positive_class=0, device=torch.device("cpu"))
    tasks.update(RankingOutput(torch.tensor([[1.0, -1], [-1, 1], [2, 2]]), torch.tensor([0b01, 0b10, 0b01])))
    figures = tasks.compute()
    assert figures["AUC_task0"] == 1.0
    assert figures["AUC_task1"] == pytest.approx(0.5)
    assert figures["AUC"] == pytest.approx(0.75)
