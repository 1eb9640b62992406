"""Uses that a program gets wrong, each named where it can first be known, and odd ones that are right."""

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from tests.commons.distributed.errors_and_warnings import warnings_of


class Shuffler(BatchShuffler):
    def get_workloads(self, batch):
        return torch.ones(len(batch["x"]), dtype=torch.int64)


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class Model(torch.nn.Module):
    def __init__(self, of: Any = torch.mean) -> None:
        super().__init__()
        self.linear, self.of = torch.nn.Linear(1, 1), of

    def forward(self, batch):
        return self.of(self.linear(batch["x"][:, None])), None


def _shuffler(**methods: Any) -> Shuffler:
    return type("Own", (Shuffler,), methods)()


def _step(batch: Any, of: Any = torch.mean, shuffler: BatchShuffler | None = None) -> Any:
    model = Model(of)
    pipeline = TrainPipelineFactory.create(
        "none",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        device="cpu",
        batch_shuffler=shuffler or Shuffler(),
        loss_reduction="mean",
    )
    pipeline.progress(iter([batch]))
    return pipeline


X, NONE = torch.ones(4), torch.empty(0, dtype=torch.int32)
WRONG = {
    "a step again": (
        lambda: Shuffler().plan(Shuffler().ahead().next_step(iter([{"x": X}]))),
        TypeError,
        "a step that was planned before.*Return None there",
    ),
    "a mean per task": (
        lambda: _step({"x": X}, lambda losses: losses[:2].flatten()),
        ValueError,
        r"losses of shape \(2,\).*this rank has 4 loss tokens; of several means, return the sum",
    ),
    "no keys": (
        lambda: Shuffler().plan({"x": X, "ids": KeyedJaggedTensor([], NONE, lengths=NONE)}),
        ValueError,
        "ids is a KeyedJaggedTensor without keys.*stride=",
    ),
    "sorted labels": (
        lambda: Shuffler().plan({"x": torch.tensor([0, 0, 1, 1]), "y": torch.ones(1)}),
        ValueError,
        "'y' has 1 and others 4. Give it a row per sample",
    ),
    "ids": (
        lambda: Shuffler().plan({"x": torch.arange(3), "y": torch.ones(2)}),
        ValueError,
        "'y' has 2 and others 3. Give it a row per sample",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_are_named(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_an_error_of_get_workloads_names_it_and_the_fields_of_the_batch():
    shuffler = _shuffler(get_workloads=lambda self, batch: batch["items"])
    with pytest.raises(KeyError) as raised:
        shuffler.plan({"x": X, "item": X})
    (note,) = raised.value.__notes__
    assert note == "Own.get_workloads raised it, on a batch whose fields are ['x', 'item']"


def test_loss_tokens_may_be_a_list_of_floats():
    weights = [0.1, 0.2, 0.3, 0.4]
    plan = _shuffler(get_loss_tokens=lambda self, batch: weights).plan({"x": X})
    assert plan.rows.loss_tokens.tolist() == weights


def test_a_dict_whose_attributes_are_its_items_trains():
    assert _step(AttributeDict(x=X, of=AttributeDict(y=X))).report.samples_moved == 0


def test_a_step_without_loss_tokens_is_warned_of_once():
    with warnings_of("commons.distributed.loss") as told:
        for _ in range(2):
            none = _shuffler(get_loss_tokens=lambda self, batch: torch.zeros(4, dtype=torch.int64))
            _step({"x": X}, shuffler=none)
    assert len(told) <= 1 and all("no rank has loss tokens in a step" in line for line in told)
