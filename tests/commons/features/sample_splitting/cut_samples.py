"""Batches of long and short samples, and what planning knows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets import HSTUBatch, SIDBatch
from commons.distributed.cutting import Cutting
from commons.distributed.loaded_samples import LoadedSamples
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.row_schema import RowSchema
from commons.sequence_batch.sample_rows import SampleRows

FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=2, head_dim=64)
CODES = 3  # of an item of SID-GR
HSTU_KINDS = ("hstu", "hstu with candidates", "hstu with negatives")
KINDS = (*HSTU_KINDS, "sid_gr")


def drawn_lengths(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Returns int64 items of samples, at least 1; some samples are longer than all others together."""
    spread = rng.choice([0.5, 1.2, 2.0])
    return rng.lognormal(5, spread, num_samples).clip(1, 20_000).astype(np.int64)


def batch_of(kind: str, lengths: np.ndarray) -> BaseBatch:
    """Makes a batch with samples of these items, int64 `[samples]`; their values count up."""
    rows = len(lengths)
    user = np.arange(rows) % 3
    if kind == "sid_gr":
        candidates = np.minimum(lengths, 1 + np.arange(rows) % 2)
        features = _keyed(
            {"user": user, "history": CODES * (lengths - candidates), "candidate": CODES * candidates}
        )
        return SIDBatch(
            features=features,
            batch_size=rows,
            feature_to_max_seqlen={},
            contextual_feature_names=["user"],
            num_hierarchies=CODES,
            target_items=torch.arange(rows),
        )
    counts = {"user": user, "item": lengths}
    counts |= {"negative": 0 * lengths + 4} if kind == "hstu with negatives" else {"action": lengths}
    candidates = np.minimum(lengths - 1, 7) if kind == "hstu with candidates" else None
    return HSTUBatch(
        features=_keyed(counts),
        batch_size=rows,
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        labels=_keyed({"label": lengths if candidates is None else candidates}),
        item_feature_name="item",
        action_feature_name="action" if "action" in counts else None,
        negatives_feature_name="negative" if "negative" in counts else None,
        max_num_candidates=0 if candidates is None else 7,
        num_candidates=None if candidates is None else torch.from_numpy(candidates),
    )


def _keyed(lengths: Mapping[str, np.ndarray]) -> KeyedJaggedTensor:
    together = torch.from_numpy(np.concatenate(list(lengths.values())))
    return KeyedJaggedTensor(list(lengths), torch.arange(int(together.sum())), lengths=together)


def quadratic(tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the cost of the first tokens, each of which costs one more than the one before."""
    return tokens * (tokens + 1) // 2


def flops(tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the FLOPs of an HSTU layer for the first tokens."""
    of_samples = counts["tokens"], counts["head_tokens"], counts["kept_tokens"]
    return FLOPS.prefix_work(tokens, *of_samples).sum(1)


def loaded_by(ranks: Sequence[int], batch: BaseBatch) -> tuple[LoadedSamples, Cutting]:
    """Returns a batch's samples as ranks loaded them, which have so many each, and how they are cut."""
    rules = batch.cut_rules()
    assert rules is not None
    fields, row_counts = batch.per_sample_fields(), batch.row_counts()
    schema, names = RowSchema.of(fields), tuple(row_counts)
    counts = np.stack([of_rows.long().numpy() for of_rows in row_counts.values()], 1)
    elements = np.stack(
        [_elements(fields[field.name], batch.batch_size) for field in schema.jagged_fields], 1
    )
    sample_rows, per_rank = SampleRows(), np.array(ranks, dtype=np.int64)
    samples = LoadedSamples(
        per_rank,
        per_rank,
        np.zeros(batch.batch_size, dtype=np.int64),
        sample_rows.num_tokens(batch).long().numpy(),
        sample_rows.num_loss_tokens(batch).long().numpy(),
        elements,
        schema.row_bytes(elements),
        counts,
    )
    cutting = Cutting(rules, schema, names, quadratic if isinstance(batch, SIDBatch) else flops)
    known = cutting.counts(samples)
    costs = cutting.prefix_cost(samples.tokens, known | rules.fixed_tokens(known))
    return replace(samples, workloads=costs, work=costs[:, None]), cutting


def _elements(value: KeyedJaggedTensor, num_rows: int) -> np.ndarray:
    return value.lengths().view(-1, num_rows).sum(0).numpy()
