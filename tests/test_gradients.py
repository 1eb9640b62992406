"""No shuffler setting changes what a step learns: not where samples are, nor in how many parts or pieces."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.pieces import Pieces
from commons.extensions.verification import Verification
from commons.training import OptimizerArgs, shard_model
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts, is_cut
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.gradient_comparison import LEARNING_RATE, check_equal, sharded, step
from tests.gradient_models import CASES, ROWS, ModelCase
from tests.on_ranks import on_ranks
from tests.process_pool import rank_device

CAPPED = {"capped": True}  # micro-batches under the model's cap
AS_LOADED = {"type": "identity"}
VERIFIED = {"verified": True}
PIECES = {"pieces": True, "equal_rows": False}
CUTS = [{"drawn": number, "equal_rows": False} for number in range(2)]  # anywhere, by a seed
EVERYWHERE = [{}, CAPPED, {**AS_LOADED, **CAPPED}]

# By name: real rows per rank, whether they have labels, and settings of the shuffler.
SETTINGS: dict[str, tuple[tuple[int, ...], bool, list[dict[str, Any]]]] = {
    "complete": ((6, 6), True, [*EVERYWHERE, *CUTS, PIECES]),
    "incomplete": ((6, 3), True, [VERIFIED, CAPPED]),
    "empty rank": ((5, 0), True, [{}, CAPPED]),
    "no loss tokens": ((6, 5), False, [{}, CAPPED]),
    "three ranks": ((6, 3, 0), True, [*CUTS, {**PIECES, **VERIFIED}]),
    "four ranks": ((2, 6, 1, 4), True, [{**CUTS[0], **VERIFIED}, PIECES]),
    "rows follow the load": (
        (6, 0, 6),
        True,
        [
            {},
            {"equal_rows": False},
            {**CAPPED, "equal_rows": False, "partitioner": "rebalance"},
            {**AS_LOADED, **CAPPED},
        ],
    ),
}
OF_PIECES = ("complete", "three ranks", "four ranks")
ONLY_OF_PIECES = ("ranking with candidates and tasks", "ranking, not causal")


def _shuffler(case: ModelCase, changed: dict[str, Any], seed: int = 0) -> BatchShuffler:
    config: dict[str, Any] = {**case.shuffler, **changed}
    made = {
        "capped": lambda _: MicroBatches(case.cap),
        "verified": lambda _: Verification(),
        "pieces": lambda _: Pieces(),
        "drawn": lambda number: DrawnCuts(seed + number),
    }
    config["extensions"] = [make(config.pop(name)) for name, make in made.items() if name in config]
    if config["type"] == "identity":
        del config["flops"]
    return BatchShufflerFactory.create_from_config(config)


def _check(name: str, pipeline: str, setting: str, seed: int) -> int:
    """Compares with a plain step; returns how many micro-batches this rank needs as loaded."""
    case, (num_real, labeled, every) = CASES[name], SETTINGS[setting]
    batch, run = case.batch(num_real, labeled), partial(step, *sharded(case.make_model()), pipeline)
    plain = run(BatchShufflerFactory.create("identity"), batch)
    for changed in every:
        check_equal(plain, run(_shuffler(case, changed, seed), batch), labeled)
    capped = BatchShufflerFactory.create("identity", extensions=[MicroBatches(case.cap)])
    return capped.extensions[0].report(capped.plan(batch))["micro_batches"]


@settings(max_examples=1)  # which takes half a second
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(
    ("name", "pipeline", "setting"),
    [
        (name, CASES[name].pipelines[(model + number) % 2], setting)  # pipelines take turns
        for model, name in enumerate(CASES)
        for number, (setting, (_, labeled, _)) in enumerate(SETTINGS.items())
        if (labeled or not name.startswith("sid_gr"))  # whose samples all have a loss
        and (setting in OF_PIECES or name not in ONLY_OF_PIECES)
    ],
)
def test_gradients_are_those_of_a_plain_step(pools, name, pipeline, setting, seed):
    needed = pools(len(SETTINGS[setting][0])).run(_check, name, pipeline, setting, seed)
    assert len(set(needed)) > 1  # as loaded, ranks need different numbers


@pytest.mark.parametrize("changed", [{}, CUTS[0]], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    ("name", "tables"), [("ranking", "embedding_collections"), ("retrieval", "item_table")]
)
@on_ranks(2)
def test_gradients_are_those_of_the_mean_over_all_loss_tokens(name, tables, changed):
    case, num_real = CASES[name], (6, 3)
    batch = case.batch(num_real, True)
    changes, _, tokens = step(*sharded(case.make_model()), "native", _shuffler(case, changed), batch)
    model = case.make_model()
    samples = [sample for rank, real in enumerate(num_real) for sample in case.samples(rank, real)]
    loss = sum(model(case.make_batch(samples[at : at + ROWS]))[0] for at in range(0, len(samples), ROWS))
    (loss / tokens).backward()
    gradients = {name: parameter.grad.double() for name, parameter in model.dense.named_parameters()}
    of_dense = {name: change.cpu() for name, change in changes.items() if "dense." in name}
    assert len(of_dense) > 10 and any(tables in name for name in changes)
    for name, change in of_dense.items():
        gradient = gradients[name.partition("dense.")[2]]
        assert (change / LEARNING_RATE - gradient).norm() < 1e-5 * gradient.norm(), name


def _evaluated(name: str, num_real: tuple[int, ...]) -> list[np.ndarray]:
    """Returns this rank's predictions in an evaluation, of whole samples and of pieces."""
    case, outputs = CASES[name], []
    for changed in ({"equal_rows": False}, CUTS[1]):
        shuffler = _shuffler(case, changed)
        model, optimizer = shard_model(case.make_model(), OptimizerArgs("sgd", 0.1), rank_device())
        pipeline = pipeline_of("native", model, optimizer, shuffler)
        model.eval()
        with torch.no_grad():
            output = pipeline.progress(iter([case.batch(num_real, True)]))
        assert is_cut(pipeline.plan) == ("drawn" in changed)
        values, labels = vars(output).values()
        outputs.append(torch.cat([labels[:, None].float(), values], 1).cpu().numpy())
        pipeline.reset()
    return outputs


@pytest.mark.parametrize("name", ["ranking", "ranking with candidates and tasks", "retrieval"])
def test_predictions_of_pieces_are_those_of_whole_samples(pools, name):
    whole, pieces = map(np.concatenate, zip(*pools(2).run(_evaluated, name, (6, 5)), strict=True))
    assert whole.shape == pieces.shape and len(whole)
    for label in np.unique(whole[:, 0]):
        whole_rows, piece_rows = (np.sort(of[of[:, 0] == label], 0) for of in (whole, pieces))
        assert piece_rows == pytest.approx(whole_rows, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["ranking", "retrieval", "sid_gr, all items"])
@on_ranks(2)
def test_pieces_take_two_collectives_per_layer(name):
    case = CASES[name]
    shuffler, batch = _shuffler(case, CUTS[1]), case.batch((6, 5), True)
    plan = shuffler.plan(batch)
    batch, model = shuffler.exchange(batch, plan), case.make_model()
    with recorded_collectives() as calls:
        loss, _ = model(batch)
        loss.backward()
    assert [name for name, _ in calls] == ["all_to_all_single"] * 4  # two layers, forward and backward
