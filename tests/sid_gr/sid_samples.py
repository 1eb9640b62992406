"""Small SID-GR models, and batches built sample by sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from commons.datasets import ItemSIDs, SIDBatch
from sid_gr.models import SIDGR, CodeTree, SIDGRConfig
from sid_gr.modules import DecoderConfig
from tests.commons.histories import keyed

CODEBOOK_SIZES = (4, 3, 5)
CONTEXTUAL_VOCABULARY = 7
CONTEXTUAL = ("tags", "country")
# Items have ids 3, 13, 23, …; 33 and 43 share a semantic ID, and so do 53 and 63.
ITEM_CODES = np.array(
    [[0, 0, 0], [0, 0, 4], [0, 2, 1], [1, 1, 1], [1, 1, 1], [3, 0, 2], [3, 0, 2], [3, 2, 3], [3, 2, 4]]
)
SIDS = ItemSIDs(items=10 * np.arange(len(ITEM_CODES)) + 3, codes=ITEM_CODES)


@dataclass(frozen=True)
class Sample:
    """History and candidates, as rows of `ITEM_CODES`; the last candidate is the target."""

    history: list[int]
    candidates: list[int]
    tags: list[int]

    @property
    def country(self) -> list[int]:
        """Country of the sample, if it has tags."""
        return [(tag + 3) % CONTEXTUAL_VOCABULARY for tag in self.tags[:1]]


@st.composite
def samples(draw: st.DrawFn, max_items: int = 5) -> Sample:
    rows = st.integers(0, len(ITEM_CODES) - 1)
    return Sample(
        history=draw(st.lists(rows, max_size=max_items)),
        candidates=draw(st.lists(rows, min_size=1, max_size=3)),
        tags=draw(st.lists(st.integers(0, CONTEXTUAL_VOCABULARY - 1), max_size=2)),
    )


def sid_batch(rows: Sequence[Sample], batch_size: int | None = None) -> SIDBatch:
    """Batches samples, followed by padding rows."""
    batch_size = len(rows) if batch_size is None else batch_size
    by_key = {
        "tags": [row.tags for row in rows],
        "history": [ITEM_CODES[row.history].flatten().tolist() for row in rows],
        "candidate": [ITEM_CODES[row.candidates].flatten().tolist() for row in rows],
        "country": [row.country for row in rows],  # one of two contextual features follows the items
    }
    padding = [[]] * (batch_size - len(rows))
    lengths = {key: [len(ids) for ids in column + padding] for key, column in by_key.items()}
    values = [value for column in by_key.values() for ids in column for value in ids]
    targets = torch.zeros(batch_size, dtype=torch.int64)
    targets[: len(rows)] = torch.tensor([int(SIDS.items[row.candidates[-1]]) for row in rows])
    return SIDBatch(
        features=keyed(lengths, torch.tensor(values, dtype=torch.int64)),
        batch_size=batch_size,
        feature_to_max_seqlen={},
        contextual_feature_names=list(CONTEXTUAL),
        actual_batch_size=len(rows),
        num_hierarchies=len(CODEBOOK_SIZES),
        target_items=targets,
    )


def sid_gr_model(
    top_k: int = 4,
    sids: ItemSIDs = SIDS,
    codebook_sizes: Sequence[int] = CODEBOOK_SIZES,
    share_lm_head: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **decoder: int | bool | float,
) -> SIDGR:
    """Makes a small model, the same at each call."""
    torch.manual_seed(seed)
    sizes = {"num_layers": 2, "hidden_size": 12, "num_heads": 4, "head_dim": 5, "num_kv_heads": 2}
    model = SIDGR(
        SIDGRConfig(
            decoder=DecoderConfig(**{**sizes, **decoder}),
            top_k=top_k,
            contextual_vocab_sizes=dict.fromkeys(CONTEXTUAL, CONTEXTUAL_VOCABULARY),
            share_lm_head=share_lm_head,
            num_position_buckets=16,
            dtype=dtype,
        ),
        CodeTree(sids, codebook_sizes),
    )
    # Larger than the default, so every input shows in the outputs.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model
