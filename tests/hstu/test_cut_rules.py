"""HSTU batches are cut as planning counts them."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import HSTUBatch
from tests.commons.features.sample_splitting.cut_samples import check_drawn_cuts
from tests.commons.histories import keyed


def _batch_of(kind: str, items: np.ndarray) -> HSTUBatch:
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


@pytest.mark.parametrize("kind", ["plain", "candidates", "negatives"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(2, 12), rows=st.sampled_from([2, 8, 32]))
def test_pieces_are_those_of_the_batch(kind, seed, num_ranks, rows):
    check_drawn_cuts(partial(_batch_of, kind), seed, num_ranks, rows)
