"""A setting of the wrong type is refused, by its name."""

import ast
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import torch

from commons.argument_checks import require_integer
from commons.checks import require_type
from commons.datasets import DynamicEmbeddingArgs, EmbeddingArgs, FeatureArgs, RandomDistribution
from commons.distributed import ShufflerSettings
from commons.training import OptimizerArgs, TensorModelParallelArgs, TrainerArgs
from hstu.training import model_args as hstu
from sid_gr.training import model_args as sid_gr
from tests.commons.datasets.random_args import random_args

REPOSITORY = Path(__file__).parents[2]
TRAINER, ADAM = TrainerArgs(train_batch_size=1), OptimizerArgs("adam", 1e-3)
HISTORY = FeatureArgs(["item"], 4)
HSTU, SID_GR = hstu.NetworkArgs(2, 16, 2, 8), sid_gr.NetworkArgs(2, 16, 2, 8)
SETTINGS = [
    TRAINER,
    ADAM,
    TensorModelParallelArgs(),
    ShufflerSettings(),
    HISTORY,
    EmbeddingArgs(["item"], "items", 10, "data_parallel"),
    DynamicEmbeddingArgs(["item"], "items", 10),
    RandomDistribution("zipf", alpha=1.2),
    random_args(),
    HSTU,
    hstu.DatasetArgs("ml-1m", 8),
    hstu.RankingArgs([8, 1]),
    hstu.RetrievalArgs(4),
    SID_GR,
    sid_gr.DatasetArgs("shop", 8, sid_gr.RANDOM, 2, [4, 4]),
]


def test_every_setting_has_its_type_checked():
    for valid in SETTINGS:
        for name in (field.name for field in fields(valid)):
            message = rf"^{type(valid).__name__}\.{name} = <object object .*: expected "
            with pytest.raises(TypeError, match=message):
                replace(valid, **{name: object()})


def test_no_configurable_is_left_out():
    configurables = {
        (".".join(path.relative_to(REPOSITORY).with_suffix("").parts), node.name)
        for package in ("commons", "hstu", "sid_gr")
        for path in (REPOSITORY / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any("gin.configurable" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    checked = {(type(valid).__module__, type(valid).__name__) for valid in SETTINGS}
    assert configurables | {(ShufflerSettings.__module__, "ShufflerSettings")} == checked


@pytest.mark.parametrize(
    ("expected", "fitting", "others"),
    [
        (bool, [True, np.True_], [0, "True", None, torch.tensor(True)]),
        (int, [3, np.int32(3)], [3.0, True, np.True_, "3", np.float64(3)]),
        (float, [0.5, 3, np.float32(0.5), np.int64(3)], [True, "0.5", 1j, torch.tensor(0.5)]),
        (int | None, [None, 3], [0.5]),
        (list[int], [[], [3], (3, 4)], [3, [3.0], "34", None]),
        (tuple[str, ...], [("AUC",), ["AUC"]], ["AUC", (1,)]),
        (dict[str, int], [{}, {"user": 3}], [{3: 3}, {"user": "3"}, []]),
    ],
)
def test_what_a_type_takes(expected, fitting, others):
    for value in fitting:
        require_type("x", value, expected)
    shown = expected.__name__ if isinstance(expected, type) else str(expected).replace(" | ", " or ")
    for value in others:
        with pytest.raises(TypeError) as raised:
            require_type("x", value, expected)
        assert f"x = {value!r} ({type(value).__name__}): expected {shown}" in str(raised.value)


@pytest.mark.parametrize(
    ("valid", "name", "values"),
    [
        (ADAM, "optimizer_str", ["lion"]),
        (ADAM, "learning_rate", [-1.0, nan, inf]),
        (ADAM, "adam_beta1", [2.0, 1.0, -0.1]),
        (ADAM, "adam_eps", [-1, nan]),
        (HSTU, "norm_epsilon", [0.0, nan]),
        (SID_GR, "is_causal", [False]),
        (hstu.DatasetArgs("ml-1m", 8, use_windows=True), "max_num_candidates", [1]),
        (hstu.RetrievalArgs(4), "temperature", [inf, 0]),
        (hstu.RetrievalArgs(4), "l2_norm_eps", [-1.0]),
        (hstu.RetrievalArgs(4), "num_negatives", [0]),
        (hstu.RetrievalArgs(4), "eval_metrics", [("AUC",)]),
        (TensorModelParallelArgs(), "tensor_model_parallel_size", [2]),
        (RandomDistribution("zipf", alpha=1.2), "alpha", [inf]),
        (RandomDistribution("normal", mean=1.0, std=1.0), "mean", [nan]),
        (TRAINER, "ckpt_save_interval", [-2]),
        (TRAINER, "balance_tolerance", [inf]),
    ],
)
def test_a_setting_out_of_range_is_named(valid, name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{type(valid).__name__}\.{name}.* = .*: expected "):
            replace(valid, **{name: value})


def test_an_integer_of_any_library_is_one_and_a_bool_is_none():
    for three in (3, np.int32(3), np.uint64(3), np.array(3), torch.tensor(3)):
        assert require_integer("epoch", three) == 3 and type(require_integer("epoch", three)) is int
    for value in (3.0, np.float64(3), "3", None, True, np.True_, torch.tensor(3.0)):
        with pytest.raises(TypeError, match=r"^epoch = .*\(\w+\): expected an integer$"):
            require_integer("epoch", value)


@pytest.mark.parametrize("args", [HSTU, SID_GR])
def test_samples_longer_than_all_positions_are_named(args):
    assert args.shared_positions(8192) == []
    [line] = args.shared_positions(8193)
    assert line.startswith("NetworkArgs.num_position_buckets = 8192: samples have up to 8193 tokens")
