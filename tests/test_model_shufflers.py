"""The models' shufflers cost, group and cut samples as the models compute them."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets import HSTUBatch, SIDBatch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops, TransformerConfig, transformer_flops
from tests.commons.extensions.pieces.cut_samples import check_drawn_cuts
from tests.commons.histories import keyed
from tests.few_examples import few_examples
from tests.hstu import hstu_samples
from tests.hstu.hstu_samples import hstu_batch
from tests.hstu.internals import HSTUBatchShuffler
from tests.on_ranks import on_ranks
from tests.sid_gr import sid_samples
from tests.sid_gr.internals import SIDGRBatchShuffler
from tests.sid_gr.sid_samples import sid_batch


def _hstu_batch(items):
    return hstu_batch([hstu_samples.Sample([1], [], [2] * n, [3] * n, 0, [3] * n) for n in items])


def _sid_batch(items):
    return sid_batch([sid_samples.Sample([0] * n, [1], [1]) for n in items])


# By name: how to batch samples by their items, and the FLOPs of a layer.
MODELS = {
    "hstu": (_hstu_batch, HSTUFlops(1, 8, 2, 4)),
    "sid_gr": (_sid_batch, partial(transformer_flops, TransformerConfig(1, 8, 2, 2, 4, 32))),
}


@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_heads_alone_place_samples_as_the_flops_of_a_layer_do(model):
    make_batch, flops = MODELS[model]
    items = [[70, 0, 30], [10, 20]][dist.get_rank()]
    by_heads, by_flops = (
        BatchShufflerFactory.create(model, **settings).plan(make_batch(items))
        for settings in ({"num_heads": 2, "head_dim": 4}, {"flops": flops})
    )
    assert by_heads.rows.workloads.tolist() == by_flops.rows.workloads.tolist()
    assert all(map(np.array_equal, by_heads.partition, by_flops.partition))
    assert by_heads.rows.workloads.max() > 3 * by_heads.rows.workloads.min()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("names", ["", "num_heads", "head_dim", "flops num_heads head_dim"])
def test_too_little_or_too_much_is_refused_with_what_was_expected(model, names):
    settings = {"num_heads": 2, "head_dim": 4, "flops": MODELS[model][1]}
    with pytest.raises(TypeError, match=r"expected (either )?flops=.*, or both num_heads= and head_dim="):
        BatchShufflerFactory.create(model, **{name: settings[name] for name in names.split()})


def test_a_config_of_recsys_examples_makes_a_shuffler(caplog):
    config = {"type": "hstu", "num_heads": 16, "head_dim": 64, "action_interleaved": True}
    BatchShufflerFactory.create_from_config(config)
    assert not caplog.messages
    BatchShufflerFactory.create_from_config({**config, "action_interleaved": False})
    assert ["action_interleaved = False has no effect" in message for message in caplog.messages] == [True]


def _counting(lengths: dict[str, np.ndarray]) -> KeyedJaggedTensor:
    return keyed(lengths, torch.arange(sum(int(of_rows.sum()) for of_rows in lengths.values())))


def _drawn_hstu_batch(kind: str, items: np.ndarray) -> HSTUBatch:
    more = {"negative": 0 * items + 4} if kind == "negatives" else {"action": items}
    candidates = np.minimum(items - 1, 7) if kind == "candidates" else None
    return HSTUBatch(
        features=_counting({"user": np.arange(len(items)) % 3, "item": items} | more),
        batch_size=len(items),
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        labels=_counting({"label": items if candidates is None else candidates}),
        action_feature_name="action" if "action" in more else None,
        negatives_feature_name="negative" if "negative" in more else None,
        max_num_candidates=0 if candidates is None else 7,
        num_candidates=None if candidates is None else torch.from_numpy(candidates),
    )


def _drawn_sid_batch(items: np.ndarray) -> SIDBatch:
    codes, rows = 3, np.arange(len(items))
    candidates = np.minimum(items, 1 + rows % 2)
    lengths = {"user": rows % 3, "history": codes * (items - candidates), "candidate": codes * candidates}
    return SIDBatch(
        features=_counting(lengths),
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
