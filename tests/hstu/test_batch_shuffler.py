import numpy as np
import pytest
import torch.distributed as dist

import hstu.batch_shuffler  # noqa: F401  registers "hstu"
from commons.distributed import BatchShufflerFactory, ShufflePlan
from commons.perf_model import HSTUFlops
from tests.hstu.hstu_samples import Sample, hstu_batch


def _plan(settings: dict) -> ShufflePlan:
    lengths = [[70, 0, 30], [10, 20]][dist.get_rank()]
    rows = [Sample([1], [], [2] * n, [3] * n, 0, [3] * n) for n in lengths]
    return BatchShufflerFactory.create("hstu", **settings).plan(hstu_batch(rows))


def _plans() -> tuple[ShufflePlan, ShufflePlan]:
    return _plan({"num_heads": 2, "head_dim": 4}), _plan({"flops": HSTUFlops(1, 8, 2, 4)})


def test_heads_alone_place_samples_as_the_flops_of_a_layer_do(pools):
    for by_heads, by_flops in pools(2).run(_plans):
        assert by_heads.rows.workloads.tolist() == by_flops.rows.workloads.tolist()
        assert all(map(np.array_equal, by_heads.partition, by_flops.partition))
        assert by_heads.rows.workloads.max() > 3 * by_heads.rows.workloads.min()


def test_a_config_of_recsys_examples_makes_a_shuffler(caplog):
    config = {"type": "hstu", "num_heads": 16, "head_dim": 64, "action_interleaved": True}
    BatchShufflerFactory.create_from_config(config)
    assert not caplog.messages
    BatchShufflerFactory.create_from_config({**config, "action_interleaved": False})
    assert ["action_interleaved = False has no effect" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_heads": 2},
        {"head_dim": 4},
        {"flops": HSTUFlops(1, 8, 2, 4), "head_dim": 4},
        {"flops": HSTUFlops(1, 8, 2, 4), "num_heads": 2, "head_dim": 4},
    ],
)
def test_too_little_or_too_much_is_refused_with_what_was_expected(settings):
    with pytest.raises(
        TypeError, match=r"expected either flops=HSTUFlops.*, or both num_heads= and head_dim="
    ):
        BatchShufflerFactory.create("hstu", **settings)


def test_samples_of_a_feature_belong_together():
    users = [5, 3, 5]
    batch = hstu_batch([Sample([user], [], [2], [3], 0, [3]) for user in users])
    groups = pytest.importorskip("commons.features.sample_groups.sample_groups").SampleGroups("user")
    BatchShufflerFactory.create("hstu", num_heads=1, head_dim=8, features=[groups])
    assert groups.columns(batch)["groups"].tolist() == users
