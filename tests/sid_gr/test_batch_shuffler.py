from functools import partial

import pytest
import torch.distributed as dist

import sid_gr.batch_shuffler  # noqa: F401  registers "sid_gr"
from commons.distributed import BatchShufflerFactory
from commons.perf_model import TransformerConfig, transformer_flops
from tests.on_ranks import on_ranks
from tests.sid_gr.sid_samples import Sample, sid_batch

FLOPS = partial(transformer_flops, TransformerConfig(1, 8, 2, 2, 4, 32))


@on_ranks(2)
def test_heads_alone_cost_what_a_layer_of_their_width_does():
    rows = [Sample([0] * n, [1], []) for n in ([7, 0, 3], [1, 2])[dist.get_rank()]]
    by_heads, by_flops = (
        BatchShufflerFactory.create("sid_gr", **settings).plan(sid_batch(rows)).rows.workloads.tolist()
        for settings in ({"num_heads": 2, "head_dim": 4}, {"flops": FLOPS})
    )
    assert len(by_heads) == 5 and by_heads == by_flops


@pytest.mark.parametrize("settings", [{}, {"num_heads": 2}, {"flops": FLOPS, "num_heads": 2, "head_dim": 4}])
def test_too_little_or_too_much_is_refused_with_what_was_expected(settings):
    with pytest.raises(TypeError, match="expected either flops=, or both num_heads= and head_dim="):
        BatchShufflerFactory.create("sid_gr", **settings)


def test_samples_of_a_feature_belong_together():
    users = [5, 3, 5]
    batch = sid_batch([Sample([0], [1], [user]) for user in users])
    groups = pytest.importorskip("commons.features.sample_groups.sample_groups").SampleGroups("tags")
    BatchShufflerFactory.create("sid_gr", num_heads=1, head_dim=8, features=[groups])
    assert groups.columns(batch)["groups"].tolist() == users
