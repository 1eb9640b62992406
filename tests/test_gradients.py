"""No shuffler setting changes what a step learns."""

from typing import Any

import pytest
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.verification import Verification
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts
from tests.gradient_comparison import Comparison, check_equal, comparison, dense_differences, steps
from tests.gradient_models import CASES, ROWS, in_turn

AS_LOADED = {"type": "identity"}
MODELS = ("ranking", "retrieval", "sid_gr, last item", "sid_gr, all items")
CAPPED = {"capped": True}  # micro-batches under the model's cap


def _compare(
    name: str, pipeline: str, num_real: tuple[int, ...], labeled: bool, settings: list[dict[str, Any]]
) -> tuple[list[Comparison], int]:
    """Returns comparisons with a plain step, and how many micro-batches this rank needs as loaded."""
    case = CASES[name]
    batch = case.batch(num_real, labeled)
    plain = steps(case.make_model(), pipeline, BatchShufflerFactory.create("identity"), [batch])
    results = []
    for changed in settings:
        config: dict[str, Any] = {**case.shuffler, **changed, "extensions": []}
        if config.pop("capped", False):
            config["extensions"].append(MicroBatches(case.cap))
        if config.pop("verified", False):
            config["extensions"].append(Verification())
        if config["type"] == "identity":
            del config["flops"]
        shuffler = BatchShufflerFactory.create_from_config(config)
        results.append(comparison(plain, steps(case.make_model(), pipeline, shuffler, [batch])))
    capped = BatchShufflerFactory.create("identity", extensions=[MicroBatches(case.cap)])
    return results, capped.extensions[0].report(capped.plan(batch))["micro_batches"]


# By name: real rows per rank, whether they have labels, and settings of the shuffler.
SETTINGS: dict[str, tuple[tuple[int, ...], bool, list[dict[str, Any]]]] = {
    "complete": ((6, 6), True, [{}, CAPPED, {**AS_LOADED, **CAPPED}]),
    "incomplete": ((6, 3), True, [{"verified": True}, CAPPED]),
    "empty rank": ((5, 0), True, [{}, CAPPED]),
    "no loss tokens": ((6, 5), False, [{}, CAPPED]),
    "three ranks": ((4, 6, 1), True, [{}, CAPPED]),
    "rows follow the load": (
        (6, 0, 6),
        True,
        [
            {"equal_rows": False},
            {**CAPPED, "equal_rows": False, "partitioner": "rebalance"},
            {**AS_LOADED, **CAPPED},
        ],
    ),
}


@pytest.mark.parametrize(
    ("name", "pipeline", "settings"),
    [
        (name, pipeline, settings)
        for name, pipeline, settings in in_turn(MODELS, SETTINGS)
        if SETTINGS[settings][1] or not name.startswith("sid_gr")  # whose samples all have a loss
    ],
)
def test_gradients_are_those_of_a_plain_step(pools, name, pipeline, settings):
    num_real, labeled, _ = SETTINGS[settings]
    ranks = pools(len(num_real)).run(_compare, name, pipeline, *SETTINGS[settings])
    for results in zip(*(comparisons for comparisons, _ in ranks), strict=True):
        check_equal(results, has_loss=labeled)
    assert len({needed for _, needed in ranks}) > 1  # as loaded, ranks need different numbers


def _compare_steps(name: str, pipeline: str, num_batches: tuple[int, ...]) -> Comparison:
    case, rank = CASES[name], dist.get_rank()
    batches = [
        case.make_batch(case.samples(rank + 10 * number, ROWS if number < num_batches[rank] else 0))
        for number in range(max(num_batches))
    ]
    plain, balanced = (
        steps(case.make_model(), pipeline, BatchShufflerFactory.create_from_config(config), batches)
        for config in (AS_LOADED, {**case.shuffler, "extensions": [Verification()]})
    )
    assert plain[2] == balanced[2] and len(set(plain[2])) > 1
    return comparison(plain, balanced)


@pytest.mark.parametrize("pipeline", ["none", "native"])
@pytest.mark.parametrize("name", ["ranking", "retrieval"])
def test_gradients_of_several_steps_are_those_of_plain_ones(pools, name, pipeline):
    check_equal(pools(2).run(_compare_steps, name, pipeline, (4, 3)), has_loss=True)


def _compare_with_one_process(
    name: str, num_real: tuple[int, ...], split: bool
) -> tuple[dict[str, float], list[str]]:
    case = CASES[name]
    settings = {"extensions": [DrawnCuts(0)], "equal_rows": False} if split else {}
    shuffler = BatchShufflerFactory.create_from_config({**case.shuffler, **settings})
    changes, _, (tokens,) = steps(case.make_model(), "native", shuffler, [case.batch(num_real, True)])
    model = case.make_model()
    samples = [sample for rank, real in enumerate(num_real) for sample in case.samples(rank, real)]
    loss = sum(model(case.make_batch(samples[at : at + ROWS]))[0] for at in range(0, len(samples), ROWS))
    (loss / tokens).backward()
    return dense_differences(changes, model), list(changes)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("name", "sharded"), [("ranking", "embedding_collections"), ("retrieval", "item_table")]
)
def test_gradients_are_those_of_the_mean_over_all_loss_tokens(pools, name, sharded, split):
    results = pools(2).run(_compare_with_one_process, name, (6, 3), split)
    for differences, _ in results:
        assert len(differences) > 10
        assert max(differences.values()) < 1e-5
    assert any(sharded in parameter for _, parameters in results for parameter in parameters)
