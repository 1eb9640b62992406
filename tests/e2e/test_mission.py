"""Balancing changes which rank computes a sample, and nothing that a model learns from it."""

import random
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.gin_files import RECSYS_EXAMPLES_SID_GR
from tests.e2e.kept_ranks import KeptRanks, model_of
from tests.e2e.movielens_files import prepare_movielens
from tests.e2e.plain_loop import plain_losses
from tests.e2e.shop_files import CATALOGUE, prepare_shop
from tests.e2e.torchrun import RANKING, REPOSITORY, RETRIEVAL, SID_GR, bind, train_log

# Two epochs, each with two whole steps of this many samples and one of what is left over.
SAMPLES_PER_STEP, NUM_STEPS = 16, 6
LONGEST = 64
RTOL = 2e-6  # float32 sums in another order differ by 3e-7


class Case(NamedTuple):
    """A training with the stage, which a training without it has to equal."""

    model: str
    histories: str
    num_ranks: int
    exchange: str
    partitioner: str
    shuffler: str
    rank_0_loads_all: bool


# Each two choices meet in one of them.
CASES = [
    Case("ranking", "lognormal", 2, "all_to_all", "rebalance", "", True),
    Case("ranking", "pareto", 4, "all_gather", "karmarkar_karp", "", False),
    Case("ranking", "two lengths", 2, "all_gather", "karmarkar_karp", "mine", False),
    Case("retrieval", "lognormal", 2, "all_gather", "karmarkar_karp", "", False),
    Case("retrieval", "pareto", 4, "all_to_all", "rebalance", "mine", True),
    Case("retrieval", "two lengths", 4, "all_to_all", "karmarkar_karp", "", True),
    Case("sid_gr", "lognormal", 4, "all_gather", "karmarkar_karp", "mine", True),
    Case("sid_gr", "pareto", 2, "all_to_all", "karmarkar_karp", "", False),
    Case("sid_gr", "two lengths", 4, "all_gather", "rebalance", "mine", False),
]

# Samples in the last step of an epoch: too few for a whole batch, for each of two ranks, for each of four.
LEFT_OVER = {"lognormal": 5, "pareto": 1, "two lengths": 3}

OWN_SHUFFLER = """
from commons.distributed import BatchShuffler, register_batch_shuffler

@register_batch_shuffler("mine")
class MyShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens() ** 2
"""

SMALL = f"""
TrainerArgs.max_train_iters = {NUM_STEPS}
TrainerArgs.eval_interval = {NUM_STEPS}
TrainerArgs.log_interval = 1
DatasetArgs.shuffle = True
NetworkArgs.num_layers = 2
NetworkArgs.hidden_size = 16
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 8
NetworkArgs.item_embedding_dim = 8
NetworkArgs.hidden_dropout = 0.0
NetworkArgs.dtype_str = "float32"
# Adam turns gradients that are pure rounding into full steps.
OptimizerArgs.optimizer_str = "sgd"
OptimizerArgs.learning_rate = 0.5
"""

_HSTU = f"include '{REPOSITORY}/hstu/training/configs/movielens_100k_%s.gin'\n{SMALL}"
_HISTORY = f"DatasetArgs.max_history_seqlen = {LONGEST}\n"
_SID_GR = f"""
TrainerArgs.eval_batch_size = None
DatasetArgs.max_history_length = {LONGEST}
DatasetArgs.max_candidate_length = 0
DatasetArgs.sequence_features_testing_data_path = "training.parquet"
"""


class Model(NamedTuple):
    entry_point: tuple[str, ...]
    task: str
    gin_text: str


MODELS = {
    "ranking": Model(RANKING, "hstu.training.ranking_task:ranking_task", _HSTU % "ranking" + _HISTORY),
    "retrieval": Model(
        RETRIEVAL,
        "hstu.training.retrieval_task:retrieval_task",
        _HSTU % "retrieval" + _HISTORY + "RetrievalArgs.num_negatives = 8\n",
    ),
    "sid_gr": Model(
        SID_GR,
        "sid_gr.training.sid_gr_task:sid_gr_task",
        "\n".join((RECSYS_EXAMPLES_SID_GR, SMALL, *CATALOGUE, _SID_GR)),
    ),
}


def draw_lengths(histories: str) -> list[int]:
    """Returns the lengths of an epoch's histories."""
    rng = random.Random(0)
    draw = {
        "lognormal": lambda user: rng.lognormvariate(2.5, 1.2),
        "pareto": lambda user: rng.paretovariate(0.7),
        "two lengths": lambda user: 3 if user % 5 else LONGEST,  # many ties
    }[histories]
    return [min(1 + int(draw(user)), LONGEST) for user in range(2 * SAMPLES_PER_STEP + LEFT_OVER[histories])]


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory) -> dict[str, Path]:
    """Returns a folder for each kind of histories, with data for all models."""
    folders = {histories: tmp_path_factory.mktemp("mission") for histories in LEFT_OVER}
    for histories, folder in folders.items():
        lengths = draw_lengths(histories)
        prepare_movielens(folder, lengths)
        prepare_shop(folder, lengths, (100, 0, 0))
        (folder / "my_shuffler.py").write_text(OWN_SHUFFLER)
    return folders


def train(kept_ranks: KeptRanks, folder: Path, case: Case, log_dir: str, **settings: object) -> list[dict]:
    """Returns the log of a run; `settings` are those of `TrainerArgs`."""
    settings |= {"train_batch_size": SAMPLES_PER_STEP // case.num_ranks, "log_dir": log_dir}
    bindings = bind(*(f"TrainerArgs.{name} = {value!r}" for name, value in settings.items()))
    entry_point = MODELS[case.model].entry_point
    kept_ranks.train(folder, *entry_point, "--gin-config-file", "config.gin", *bindings, ranks=case.num_ranks)
    return train_log(folder / log_dir)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_a_training_with_the_stage_equals_one_without(kept_ranks, workspaces, case):
    folder = workspaces[case.histories]
    (folder / "config.gin").write_text(f"import my_shuffler\n{MODELS[case.model].gin_text}")
    task, whole_steps = MODELS[case.model].task, f"TrainerArgs.train_batch_size = {SAMPLES_PER_STEP}"
    [losses] = kept_ranks.run(model_of(task), 1, plain_losses, str(folder), task, "config.gin", whole_steps)
    run = partial(train, kept_ranks, folder, case)
    without = run(f"{case.model}-without", enable_balanced_shuffler=False)
    with_stage = run(
        f"{case.model}-with",
        enable_balanced_shuffler=True,
        balance_exchange=case.exchange,
        balance_partitioner=case.partitioner,
        batch_shuffler=case.shuffler,
        single_rank_load=case.rank_0_loads_all,
    )
    plain, balanced = ([line for line in log if line["kind"] == "train"] for log in (without, with_stage))
    for steps in (plain, balanced):
        check_samples_of_steps(steps, case)
        assert [step["loss"] for step in steps] == pytest.approx(losses, rel=RTOL)
    assert [step["loss"] for step in balanced] == pytest.approx([step["loss"] for step in plain], rel=RTOL)
    # Rounding may move one user past another.
    assert with_stage[-1] == pytest.approx(without[-1], abs=1.01 / len(draw_lengths(case.histories)))
    assert all(step["imbalance_after"] == step["imbalance_before"] for step in plain)
    assert all(step["bytes_sent"] == 0 for step in plain)
    assert sum(step["imbalance_before"] - step["imbalance_after"] for step in balanced) > 0.1 * NUM_STEPS
    assert sum(step["bytes_sent"] for step in balanced) > 0


def check_samples_of_steps(steps: list[dict], case: Case) -> None:
    """Asserts that a run trained all samples, and that ranks were as empty as the case wants them."""
    left_over, whole = LEFT_OVER[case.histories], SAMPLES_PER_STEP
    assert [sum(step["samples_after"]) for step in steps] == [whole, whole, left_over] * 2
    assert [min(steps[last]["samples_after"]) for last in (2, 5)] == [left_over // case.num_ranks] * 2


def test_each_two_choices_meet_in_a_case():
    for first, second in combinations(range(len(Case._fields)), 2):
        met = {(case[first], case[second]) for case in CASES}
        assert len(met) == len({case[first] for case in CASES}) * len({case[second] for case in CASES})
