"""Settings of a training: what is refused, what has no effect, and what shufflers and pipelines get."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from commons.perf_model import Cost
from commons.training import OptimizerArgs, TensorModelParallelArgs, TrainerArgs, TrainingTask
from tests.commons.training.small_task import small_task
from tests.hstu.hstu_samples import Sample, hstu_batch


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_batch_size": 0}, "train_batch_size = 0: expected at least 1"),
        ({"log_interval": 0}, "log_interval = 0"),
        ({"max_train_iters": 0}, "max_train_iters = 0"),
        ({"peak_tflops": 0.0}, "peak_tflops = 0.0: expected a number above 0"),
        ({"profile_step_start": 0}, "profile_step_start = 0: expected at least 1"),
        ({"profile_step_end": 100}, "profile_step_end = 100: expected more than profile_step_start"),
        ({"single_rank_load": True}, "single_rank_load = True: expected False without enable_balanced_sh"),
        ({"balance_exchange": "a"}, r"balance_exchange = 'a'; there are \['all_gather', 'all_to_all'\]"),
        ({"balance_partitioner": "a"}, r"balance_partitioner = 'a'; there are \['karmarkar_karp'"),
        ({"balance_tolerance": -0.1}, "balance_tolerance = -0.1: expected a finite number of at least 0"),
        ({"balance_max_tokens": 0}, "balance_max_tokens = 0: expected an integer of at least 1"),
        ({"balance_window": 2}, r"balance_window = 2: each step .*\(TrainerArgs.balance_split = True\)"),
        ({"balance_window_max_step_ratio": 1.5}, "balance_window_max_step_ratio = 1.5: each step"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch = 0: expected an integer of at"),
        ({"balance_speed_limit": 1.5}, "balance_speed_limit = 1.5: expected its default without balance_c"),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^TrainerArgs.{message}"):
        TrainerArgs(**{"train_batch_size": 1, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerArgs("lion", 0.1), "OptimizerArgs.optimizer_str = 'lion': expected one of adam"),
        (lambda: OptimizerArgs("sgd", -1), "OptimizerArgs.learning_rate = -1"),
        (lambda: TensorModelParallelArgs(2), "tensor_model_parallel_size = 2: expected 1"),
    ],
)
def test_another_bad_setting_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_window_of_one_step_is_no_setting():
    args = TrainerArgs(train_batch_size=1, enable_balanced_shuffler=True, balance_window=1)
    assert args == TrainerArgs(train_batch_size=1, enable_balanced_shuffler=True)
    assert args.balance_settings == {} and replace(args, seed=1).seed == 1


def test_settings_of_a_shuffler_that_is_off_have_no_effect():
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
    """The tokens of each micro-batch's samples, as planned by the shuffler that the settings name."""
    args = TrainerArgs(train_batch_size=1, **settings)
    assert args.settings_without_effect() == []
    rows = [Sample([], [], [1] * items, [1] * items, 0, [1] * items) for items in (3, 9, 4, 9, 8, 1, 5)]
    plan = small_task().make_shuffler(args).plan(hstu_batch(rows))
    return [plan.tokens[numbers].tolist() for numbers in plan.micro_batches_on(0)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_balanced_shuffler": True},
        {"enable_balanced_shuffler": True, "batch_shuffler": "identity"},
    ],
    ids=["none", "the model's", "another"],
)
def test_any_shuffler_gets_the_setting_of_micro_batches(settings):
    assert _tokens_in_micro_batches(**settings) == []
    divided = _tokens_in_micro_batches(max_tokens_per_micro_batch=20, **settings)
    assert sorted(tokens for of_one in divided for tokens in of_one) == [2, 6, 8, 10, 16, 18, 18]
    assert max(map(sum, divided)) <= 20


def _pipelines(has_cacheable_tables: bool) -> list[str]:
    task = TrainingTask(None, None, None, None, None, "hstu", {}, has_cacheable_tables=has_cacheable_tables)
    args = TrainerArgs(train_batch_size=1, pipeline_type="prefetch")
    return [task.pipeline_name(args, torch.device(device)) for device in ("cpu", "cuda")]


def test_a_model_without_tables_to_cache_is_not_prefetched(pools):
    assert pools(2).run(_pipelines, True)[0] == ["native", "prefetch"]
    assert pools(2).run(_pipelines, False)[0] == ["native", "native"]


def test_costs_that_a_run_has_learned_have_a_file(tmp_path):
    args = TrainerArgs(
        train_batch_size=4, enable_balanced_shuffler=True, balance_cost="learned", log_dir=str(tmp_path)
    )
    assert args.cost_file() is None
    learned = tmp_path / "learned_cost.json"
    Cost((1.0, 2.0, 3.0)).save(learned)
    assert args.cost_file() == learned
    assert replace(args, balance_cost=str(learned), log_dir="elsewhere").cost_file() == learned
    assert replace(args, balance_cost="flops").cost_file() is None
