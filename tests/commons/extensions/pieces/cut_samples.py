"""Batches of long and short samples with all rules of cutting, what planning knows of them, and checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import ShufflePlan, ShufflerSettings
from commons.extensions.pieces import cut_rules as of
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.internals import RowTable, make_plan, place
from tests.commons.extensions.pieces.internals import MIN_TOKENS, Cutting, cut_and_place, cut_rows
from tests.commons.histories import FLOPS, TokenShuffler, drawn_lengths, histories
from tests.commons.sequence_batch.internals import Rows, Schema, read_lengths

KINDS = ("history", "history with candidates", "ahead")
RULES = of.CutRules(
    items=(of.ItemGroup("features.item"),),
    head=("features.user",),
    fields={
        "features.user": of.WITH_FIRST,
        "features.item": of.FieldRule("items", after=1),
        "features.negative": of.TO_EVERY,
        "labels": of.FROM_END,
        "loss_tokens": of.FROM_END,
        "frames": of.FieldRule("items", 2),
        "number": of.WITH_LAST,
        "times": of.TO_EVERY,
    },
)


@dataclass(eq=False)
class AheadBatch(BaseBatch):
    """Items with two frames each, of which a piece looks at the one after it, and what else there may be."""

    frames: JaggedTensor | None = None
    number: torch.Tensor | None = None
    times: torch.Tensor | None = None

    def num_tokens(self) -> torch.Tensor:
        lengths = self.features.lengths().view(3, -1)
        return lengths[0].long() + lengths[1]

    def cut_rules(self) -> of.CutRules:
        return RULES


def ahead_batch(
    rng: np.random.Generator, items: Sequence[int] | np.ndarray, num_padding: int = 0
) -> AheadBatch:
    """Draws samples in which every value is unlike all others, then padding rows."""
    has_user = np.repeat([1, 0], [len(items), num_padding])
    of_item = np.append(items, np.zeros(num_padding, dtype=np.int64)).astype(np.int64)
    of_label = np.minimum(rng.integers(0, 6, len(of_item)), of_item)

    def values(lengths: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 2**40, int(lengths.sum())))

    lengths = np.concatenate([has_user, of_item, 3 * has_user])
    return AheadBatch(
        features=KeyedJaggedTensor(
            ["user", "item", "negative"], values(lengths), lengths=torch.from_numpy(lengths).int()
        ),
        batch_size=len(of_item),
        actual_batch_size=len(items),
        feature_to_max_seqlen={},
        labels=KeyedJaggedTensor(["label"], values(of_label), lengths=torch.from_numpy(of_label)),
        frames=JaggedTensor(
            values(2 * of_item)[:, None].expand(-1, 2), lengths=torch.from_numpy(2 * of_item)
        ),
        number=torch.from_numpy(rng.integers(1, 100, len(of_item)) * has_user),
        times=torch.from_numpy(rng.random((len(of_item), 2)) * has_user[:, None]),
    )


def batch_of(kind: str, items: np.ndarray) -> BaseBatch:
    """Makes a batch with samples of these items, int64 `[samples]`."""
    if kind == "ahead":
        return ahead_batch(np.random.default_rng(0), items)
    candidates = np.minimum(items - 1, 7) if kind == "history with candidates" else None
    return histories(items, num_users=np.arange(len(items)) % 3, num_candidates=candidates)


def quadratic(tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the cost of the first tokens, each of which costs one more than the one before."""
    return tokens * (tokens + 1) // 2


def flops(tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the FLOPs of an HSTU layer for the first tokens."""
    of_samples = counts["tokens"], counts["head_tokens"], counts["kept_tokens"]
    return FLOPS.prefix_work(tokens, *of_samples).sum(1)


def loaded_by(
    ranks: Sequence[int], batch: BaseBatch, shuffler: Any = TokenShuffler
) -> tuple[RowTable, Cutting]:
    """Returns a batch's samples as ranks loaded them, which have so many each, and how they are cut."""
    rules = shuffler.cut_rules(batch)
    fields, row_counts = batch.per_sample_fields(), batch.row_counts()
    schema, names = Schema.of(fields), tuple(row_counts)
    lengths = read_lengths(fields, schema, batch.batch_size)
    view, per_rank = Rows(batch), np.array(ranks, dtype=np.int64)
    samples = RowTable(
        per_rank,
        per_rank,
        np.zeros(batch.batch_size, dtype=np.int64),
        view.num_tokens().long().numpy(),
        view.num_loss_tokens().long().numpy(),
        lengths,
        schema.row_bytes(lengths),
        columns={name: of_rows.long().numpy() for name, of_rows in row_counts.items()},
    )
    cutting = Cutting(rules, schema, names, flops if hasattr(batch, "num_candidates") else quadratic)
    known = cutting.counts(samples)
    costs = cutting.prefix_cost(samples.tokens, known | rules.fixed_tokens(known))
    return replace(samples, workloads=costs, work=costs[:, None]), cutting


def placed(rows: RowTable, cutting: Cutting | None, **options: Any) -> ShufflePlan:
    """Returns the plan of rows of one set of ranks, cut unless `cutting` is None."""
    settings = ShufflerSettings(equal_rows=False, **options)
    if cutting is None:
        return place(rows, settings)
    return make_plan(*cut_and_place(rows, settings, replace(cutting, cost=rows.cost)))


def imbalance_of(plan: ShufflePlan) -> float:
    return plan.loads.max() / max(plan.loads.mean(), 1)


def check_pieces(plan: ShufflePlan, samples: RowTable, cutting: Cutting) -> None:
    """Checks that pieces cover their samples, and that what is per token or cost adds up to theirs."""
    pieces, sample_of = plan.rows.columns["pieces"], plan.rows.sample_of
    assert sample_of[-1] + 1 == len(samples.workloads)
    ends_sample = np.append(plan.rows.starts_sample[1:], True)
    num_items = cutting.rules.num_items(cutting.counts(samples))
    for unit, of_samples in (("item", num_items), ("token", samples.tokens)):
        first, last = pieces[f"first_{unit}"], pieces[f"last_{unit}"]
        assert (pieces[f"num_{unit}s"] == of_samples[sample_of]).all()
        assert (first[plan.rows.starts_sample] == 0).all()
        assert (last[ends_sample] == of_samples).all()
        assert (first[1:][~plan.rows.starts_sample[1:]] == last[:-1][~ends_sample[:-1]]).all()
    assert (plan.rows.tokens == pieces["last_token"] - pieces["first_token"]).all()
    for name in ("workloads", "tokens", "loss_tokens"):
        sums = np.bincount(sample_of, getattr(plan.rows, name))
        assert (sums == getattr(samples, name)).all()
    is_cut = np.bincount(sample_of)[sample_of] > 1
    assert plan.rows.tokens[is_cut].min(initial=MIN_TOKENS) >= MIN_TOKENS
    same_sample = sample_of[1:] == sample_of[:-1]
    assert (plan.destination[1:] != plan.destination[:-1])[same_sample].all()  # or the cut is for nothing
    assert plan.rows.num_loaded.sum() == plan.num_rows.sum() - (plan.num_placed == 0).sum() == len(sample_of)


def check_drawn_cuts(
    make: Callable[[np.ndarray], BaseBatch], shuffler: Any, seed: int, num_ranks: int, rows: int
) -> None:
    """Checks the pieces of batches that are made from drawn numbers of items."""
    batch = make(drawn_lengths(np.random.default_rng(seed), rows * num_ranks))
    samples, cutting = loaded_by([rows] * num_ranks, batch, shuffler)
    plan = placed(samples, cutting)
    if not plan.rows.starts_sample.all():
        check_pieces(plan, samples, cutting)
        check_cut(batch, plan, cutting)


def check_cut(batch: BaseBatch, plan: ShufflePlan, cutting: Cutting) -> None:
    """Checks that the cut batch has the lengths and bytes that the plan has for its pieces."""
    cut = cut_rows(Rows(batch), plan.rows.columns["pieces"], cutting.rules)
    for name, counts in cut.batch.row_counts().items():
        assert (counts.numpy() == plan.rows.columns[name]).all()
    assert np.array_equal(read_lengths(cut.fields, cut.schema, cut.num_rows), plan.rows.key_lengths)
    assert (plan.rows.sample_bytes == cutting.schema.row_bytes(plan.rows.key_lengths)).all()
