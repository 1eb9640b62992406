"""The models' shufflers cost, group and cut samples as the models compute them."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import HSTUBatch, SIDBatch
from commons.distributed import BatchShufflerFactory
from commons.extensions.sample_groups import SampleGroups
from commons.perf_model import HSTUFlops, TransformerConfig, transformer_flops
from hstu.batch_shuffler import HSTUBatchShuffler
from sid_gr.batch_shuffler import SIDGRBatchShuffler
from tests.commons.extensions.pieces.cut_samples import check_drawn_cuts
from tests.commons.histories import keyed
from tests.few_examples import few_examples
from tests.hstu import hstu_samples
from tests.hstu.hstu_samples import hstu_batch
from tests.on_ranks import on_ranks
from tests.sid_gr import sid_samples
from tests.sid_gr.sid_samples import sid_batch


def _hstu_batch(items, users):
    rows = zip(items, users, strict=True)
    return hstu_batch([hstu_samples.Sample([user], [], [2] * n, [3] * n, 0, [3] * n) for n, user in rows])


def _sid_batch(items, users):
    rows = zip(items, users, strict=True)
    return sid_batch([sid_samples.Sample([0] * n, [1], [user]) for n, user in rows])


# By name: how to batch samples by items and users, the feature of users, and the FLOPs of a layer.
MODELS = {
    "hstu": (_hstu_batch, "user", HSTUFlops(1, 8, 2, 4)),
    "sid_gr": (_sid_batch, "tags", partial(transformer_flops, TransformerConfig(1, 8, 2, 2, 4, 32))),
}


@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_heads_alone_place_samples_as_the_flops_of_a_layer_do(model):
    make_batch, _, flops = MODELS[model]
    items = [[70, 0, 30], [10, 20]][dist.get_rank()]
    by_heads, by_flops = (
        BatchShufflerFactory.create(model, **settings).plan(make_batch(items, [1] * len(items)))
        for settings in ({"num_heads": 2, "head_dim": 4}, {"flops": flops})
    )
    assert by_heads.rows.workloads.tolist() == by_flops.rows.workloads.tolist()
    assert all(map(np.array_equal, by_heads.partition, by_flops.partition))
    assert by_heads.rows.workloads.max() > 3 * by_heads.rows.workloads.min()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("names", ["", "num_heads", "head_dim", "flops head_dim", "flops num_heads head_dim"])
def test_too_little_or_too_much_is_refused_with_what_was_expected(model, names):
    settings = {"num_heads": 2, "head_dim": 4, "flops": MODELS[model][2]}
    with pytest.raises(TypeError, match=r"expected (either )?flops=.*, or both num_heads= and head_dim="):
        BatchShufflerFactory.create(model, **{name: settings[name] for name in names.split()})


@pytest.mark.parametrize("model", MODELS)
def test_samples_of_a_feature_belong_together(model):
    make_batch, feature, _ = MODELS[model]
    groups, users = SampleGroups(feature), [5, 3, 5]
    BatchShufflerFactory.create(model, num_heads=1, head_dim=8, extensions=[groups])
    assert groups.columns(make_batch([1, 1, 1], users))["groups"].tolist() == users


def test_a_config_of_recsys_examples_makes_a_shuffler(caplog):
    config = {"type": "hstu", "num_heads": 16, "head_dim": 64, "action_interleaved": True}
    BatchShufflerFactory.create_from_config(config)
    assert not caplog.messages
    BatchShufflerFactory.create_from_config({**config, "action_interleaved": False})
    assert ["action_interleaved = False has no effect" in message for message in caplog.messages] == [True]


def _drawn_hstu_batch(kind: str, items: np.ndarray) -> HSTUBatch:
    lengths = {"user": np.arange(len(items)) % 3, "item": items}
    lengths |= {"negative": 0 * items + 4} if kind == "negatives" else {"action": items}
    candidates = np.minimum(items - 1, 7) if kind == "candidates" else None
    labels = items if candidates is None else candidates
    return HSTUBatch(
        features=keyed(lengths, torch.arange(sum(int(of.sum()) for of in lengths.values()))),
        batch_size=len(items),
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        labels=keyed({"label": labels}, torch.arange(int(labels.sum()))),
        action_feature_name="action" if "action" in lengths else None,
        negatives_feature_name="negative" if "negative" in lengths else None,
        max_num_candidates=0 if candidates is None else 7,
        num_candidates=None if candidates is None else torch.from_numpy(candidates),
    )


def _drawn_sid_batch(items: np.ndarray) -> SIDBatch:
    codes, rows = 3, np.arange(len(items))
    candidates = np.minimum(items, 1 + rows % 2)
    lengths = {"user": rows % 3, "history": codes * (items - candidates), "candidate": codes * candidates}
    return SIDBatch(
        features=keyed(lengths, torch.arange(sum(int(of.sum()) for of in lengths.values()))),
        batch_size=len(items),
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        num_hierarchies=codes,
        target_items=torch.from_numpy(rows),
    )


@pytest.mark.parametrize("kind", ["plain", "candidates", "negatives", "sid_gr"])
@few_examples
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(2, 12), rows=st.sampled_from([2, 8, 32]))
def test_pieces_are_those_of_the_batch(kind, seed, num_ranks, rows):
    make_batch, shuffler = partial(_drawn_hstu_batch, kind), HSTUBatchShuffler
    if kind == "sid_gr":
        make_batch, shuffler = _drawn_sid_batch, SIDGRBatchShuffler
    check_drawn_cuts(make_batch, shuffler, seed, num_ranks, rows)
