"""Settings of a training: what is refused, what has no effect, and what shufflers and pipelines get."""

import sys
from dataclasses import replace

import pytest
import torch

from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.extensions.sample_groups import SampleGroups
from commons.extensions.unshuffle import Unshuffle
from commons.perf_model import Cost
from commons.training import OptimizerArgs, TrainerArgs, shard_model
from tests.commons.extensions.learned_costs.internals import SPEED_LIMIT
from tests.commons.training.internals import StepVote
from tests.commons.training.small_task import CPU, small_task
from tests.hstu.hstu_samples import SAMPLE, hstu_batch, ranking_model
from tests.on_ranks import on_ranks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_batch_size": 0}, "train_batch_size = 0: expected at least 1"),
        ({"peak_tflops": 0.0}, "peak_tflops = 0.0: expected a number above 0"),
        ({"profile_step_end": 100}, "profile_step_end = 100: expected more than profile_step_start"),
        ({"single_rank_load": True}, "single_rank_load = True: expected False without enable_balanced_sh"),
        ({"balance_partitioner": "a"}, r"balance_partitioner = 'a'; there are \['karmarkar_karp'"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch = 0: expected an integer of at"),
        ({"balance_speed_limit": 1.5}, "balance_speed_limit = 1.5: expected its default without balance_c"),
        ({"balance_group_feature": "user", "balance_partitioner": "refined"}, "balance_group_feature = 'use"),
        (
            {"balance_split": True, "balance_equal_rows": False, "max_tokens_per_micro_batch": 8},
            "max_tokens_per_micro_batch = 8, TrainerArgs.balance_split = True: pieces excludes",
        ),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^(unknown )?TrainerArgs.{message}"):
        TrainerArgs(**{"train_batch_size": 1, **settings})


def test_settings_of_a_shuffler_that_is_off_have_no_effect():
    args = TrainerArgs(train_batch_size=1, batch_shuffler="mine", balance_tolerance=0.1)
    lines = args.settings_without_effect()
    assert [line.split(" = ")[0] for line in lines] == [
        "TrainerArgs.batch_shuffler",
        "TrainerArgs.balance_tolerance",
    ]
    on = TrainerArgs(1, enable_balanced_shuffler=True, balance_tolerance=0.1)
    assert on.settings_without_effect() == []
    assert on.balance_settings == {"tolerance": 0.1}


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
    for cap, expected in ((None, []), (20, [("micro_batches", 20)])):
        args = TrainerArgs(train_batch_size=1, max_tokens_per_micro_batch=cap, **settings)
        assert args.settings_without_effect() == []
        extensions = small_task().make_shuffler(args).extensions
        assert [(extension.name, extension.max_tokens) for extension in extensions] == expected


@on_ranks(2)
def test_pipelines_that_run_instead_of_others():
    args = TrainerArgs(train_batch_size=1, pipeline_type="prefetch")
    for has_cacheable_tables, on_gpu in ((True, "prefetch"), (False, "native")):
        task = replace(small_task(), has_cacheable_tables=has_cacheable_tables)
        names = [task.pipeline_name(args, torch.device(device)) for device in ("cpu", "cuda")]
        assert names == ["native", on_gpu]
    assert small_task().pipeline_name(replace(args, pipeline_type="sw_serial"), CPU) == "none"
    with pytest.raises(ValueError, match="pipeline_type = 'nothing': expected one of"):
        small_task().pipeline_name(replace(args, pipeline_type="nothing"), CPU)


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


def test_defaults_are_those_of_the_extensions():
    assert TrainerArgs.balance_speed_limit == SPEED_LIMIT


class _Plain(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens()


class _Grouped(_Plain):
    def get_groups(self, batch):
        return torch.arange(batch.batch_size)


class _WithoutArguments(_Plain):
    def __init__(self):
        super().__init__(partitioner="refined")


class _WithExtensions(_Plain):
    def __init__(self, **settings):
        super().__init__(extensions=[Unshuffle()], **settings)


OWN = {"grouped": _Grouped, "without arguments": _WithoutArguments, "with extensions": _WithExtensions}


def _shuffler(*extensions, **settings) -> BatchShuffler:
    for name, kind in OWN.items():
        BatchShufflerFactory.register(name, kind)
    args = TrainerArgs(train_batch_size=1, enable_balanced_shuffler=True, **settings)
    try:
        return small_task().make_shuffler(args, *extensions)
    finally:
        for name in OWN:
            BatchShufflerFactory.unregister(name)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("grouped", {}, {"sample_groups", "step_vote"}),
        ("grouped", {"balance_partitioner": "refined"}, {"step_vote"}),  # which takes no groups
        ("without arguments", {}, {"step_vote"}),
        ("with extensions", {"balance_partitioner": "refined"}, {"unshuffle", "step_vote"}),
    ],
)
@on_ranks(2)
def test_a_shuffler_need_not_take_what_no_flag_asks_for(name, settings, expected):
    shuffler = _shuffler(StepVote(), batch_shuffler=name, **settings)
    assert {extension.name for extension in shuffler.extensions} == expected


def test_the_shufflers_own_groups_are_heeded():
    (groups,) = _shuffler(batch_shuffler="grouped", balance_moves_per_copy=8.0).extensions
    assert (groups.name, groups.moves_per_copy) == ("sample_groups", 8.0)
    assert SampleGroups("user").moves_per_copy == TrainerArgs(1).balance_moves_per_copy
    with pytest.raises(ValueError, match=r"balance_moves_per_copy = 8.0.* does not know"):
        _shuffler(balance_moves_per_copy=8.0)
    with pytest.raises(ValueError, match="balance_group_feature"):
        _shuffler(batch_shuffler="grouped", balance_group_feature="user", balance_moves_per_copy=8.0)


def test_an_extension_that_is_not_installed_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("commons.extensions.pieces")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "commons.extensions.pieces", None)
    settings = {"balance_split": True, "balance_equal_rows": False}
    message = "^TrainerArgs.balance_split = True needs commons.extensions.pieces, which is not inst"
    with pytest.raises(ModuleNotFoundError, match=message):
        TrainerArgs(train_batch_size=1, **settings)
    assert TrainerArgs(train_batch_size=1, max_tokens_per_micro_batch=9).max_tokens_per_micro_batch == 9


OPTIMIZERS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1)
def test_dense_parameters_decay_and_sharded_tables_do_not(name):
    model, optimizer = shard_model(ranking_model(), OptimizerArgs(name, 0.1, weight_decay=0.5), CPU)
    tables = dict(model.fused_optimizer.params)
    assert tables
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    (0 * model(hstu_batch([SAMPLE]))[0]).backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        expected = before[key]
        if key not in tables:
            expected.grad = torch.zeros_like(expected)
            OPTIMIZERS[name]([expected], lr=0.1, weight_decay=0.5).step()
            assert not torch.equal(expected, ranking_model().get_parameter(key)), key
        torch.testing.assert_close(parameter.detach(), expected, msg=key)


def test_a_negative_weight_decay_is_named():
    with pytest.raises(ValueError, match=r"OptimizerArgs.weight_decay = -0.1: expected finite, and at least"):
        OptimizerArgs("sgd", 0.1, weight_decay=-0.1)
