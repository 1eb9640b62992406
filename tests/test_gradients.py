"""No shuffler setting changes what a step learns: not where samples are, nor in how many parts or pieces."""

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
from tests.gradient_comparison import Comparison, check_equal, comparison, dense_differences, step
from tests.gradient_models import CASES, ROWS, ModelCase, in_turn
from tests.on_ranks import on_ranks
from tests.process_pool import rank_device

CAPPED = {"capped": True}  # micro-batches under the model's cap
AS_LOADED = {"type": "identity"}
VERIFIED = {"verified": True}
PIECES = {"pieces": True, "equal_rows": False}
CUTS = [{"drawn": number, "equal_rows": False} for number in range(3)]  # anywhere, by a seed
EVERYWHERE = [{}, CAPPED, {**AS_LOADED, **CAPPED}]

# By name: real rows per rank, whether they have labels, and settings of the shuffler.
SETTINGS: dict[str, tuple[tuple[int, ...], bool, list[dict[str, Any]]]] = {
    "complete": ((6, 6), True, [*EVERYWHERE, *CUTS, PIECES]),
    "incomplete": ((6, 3), True, [VERIFIED, CAPPED]),
    "empty rank": ((5, 0), True, [{}, CAPPED]),
    "no loss tokens": ((6, 5), False, [{}, CAPPED]),
    "three ranks": ((6, 3, 0), True, [*CUTS, {**PIECES, **VERIFIED}]),
    "four ranks": ((2, 6, 1, 4), True, [{**CUTS[0], **VERIFIED}, *CUTS[1:], PIECES]),
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


def _compare(
    name: str, pipeline: str, num_real: tuple[int, ...], labeled: bool, every: list[dict[str, Any]], seed: int
) -> tuple[list[Comparison], int]:
    """Returns comparisons with a plain step, and how many micro-batches this rank needs as loaded."""
    case = CASES[name]
    batch = case.batch(num_real, labeled)
    plain = step(case.make_model(), pipeline, BatchShufflerFactory.create("identity"), batch)
    results = [
        comparison(plain, step(case.make_model(), pipeline, _shuffler(case, changed, seed), batch))
        for changed in every
    ]
    capped = BatchShufflerFactory.create("identity", extensions=[MicroBatches(case.cap)])
    return results, capped.extensions[0].report(capped.plan(batch))["micro_batches"]


@settings(max_examples=1)  # which takes half a second
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(
    ("name", "pipeline", "setting"),
    [
        (name, pipeline, setting)
        for name, pipeline, setting in in_turn(CASES, SETTINGS)
        if (SETTINGS[setting][1] or not name.startswith("sid_gr"))  # whose samples all have a loss
        and (setting in OF_PIECES or name not in ONLY_OF_PIECES)
    ],
)
def test_gradients_are_those_of_a_plain_step(pools, name, pipeline, setting, seed):
    num_real, labeled, every = SETTINGS[setting]
    ranks = pools(len(num_real)).run(_compare, name, pipeline, num_real, labeled, every, seed)
    for results in zip(*(comparisons for comparisons, _ in ranks), strict=True):
        check_equal(results, has_loss=labeled)
    assert len({needed for _, needed in ranks}) > 1  # as loaded, ranks need different numbers


@pytest.mark.parametrize("changed", [{}, CUTS[0]], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    ("name", "sharded"), [("ranking", "embedding_collections"), ("retrieval", "item_table")]
)
@on_ranks(2)
def test_gradients_are_those_of_the_mean_over_all_loss_tokens(name, sharded, changed):
    case, num_real = CASES[name], (6, 3)
    batch = case.batch(num_real, True)
    changes, _, tokens = step(case.make_model(), "native", _shuffler(case, changed), batch)
    model = case.make_model()
    samples = [sample for rank, real in enumerate(num_real) for sample in case.samples(rank, real)]
    loss = sum(model(case.make_batch(samples[at : at + ROWS]))[0] for at in range(0, len(samples), ROWS))
    (loss / tokens).backward()
    differences = dense_differences(changes, model)
    assert len(differences) > 10 and max(differences.values()) < 1e-5
    assert any(sharded in parameter for parameter in changes)


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
