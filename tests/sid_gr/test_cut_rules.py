"""SID-GR batches are cut as planning counts them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import SIDBatch
from commons.distributed import ShufflerSettings
from commons.distributed.placement import place
from tests.commons.features.sample_splitting.cut_samples import check_cut, check_pieces, loaded_by
from tests.commons.histories import drawn_lengths, keyed

CODES = 3


def _batch_of(items: np.ndarray) -> SIDBatch:
    rows = np.arange(len(items))
    candidates = np.minimum(items, 1 + rows % 2)
    lengths = {"user": rows % 3, "history": CODES * (items - candidates), "candidate": CODES * candidates}
    return SIDBatch(
        features=keyed(lengths, torch.arange(sum(int(of.sum()) for of in lengths.values()))),
        batch_size=len(items),
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        num_hierarchies=CODES,
        target_items=torch.from_numpy(rows),
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(2, 12), rows=st.sampled_from([2, 8, 32]))
def test_pieces_are_those_of_the_batch(seed, num_ranks, rows):
    batch = _batch_of(drawn_lengths(np.random.default_rng(seed), rows * num_ranks))
    samples, cutting = loaded_by([rows] * num_ranks, batch)
    plan = place(samples, ShufflerSettings(equal_rows=False), cutting=cutting)
    if plan.pieces is not None:
        check_pieces(plan, samples, cutting)
        check_cut(batch, plan, cutting)
