"""SID-GR batches are cut as planning counts them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import SIDBatch
from tests.commons.features.sample_splitting.cut_samples import check_drawn_cuts
from tests.commons.histories import keyed

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
    check_drawn_cuts(_batch_of, seed, num_ranks, rows)
