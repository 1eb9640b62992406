"""Measures `Padded`: computed loads of its plans, and steps of two ranks that train.

The model is a small SASRec, which predicts a label of each item from the items up to it. All its shapes
follow the lengths of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from benchmarks.harness import (
    Arm,
    Record,
    average,
    compare_times,
    list_cases,
    measure_cases,
    run_on_ranks,
    summarize,
    train_in_turn,
)
from benchmarks.markdown import Cell, join_rows, make_table
from benchmarks.partition.placements import (
    KUAIRAND,
    RANKS_PER_NODE,
    ROWS_PER_RANK,
    YAMBDA,
    Lengths,
    list_lengths,
)
from commons.datasets.sample_source import keyed_rows
from commons.distributed import BalanceReport, BatchShuffler, ShufflePlan
from commons.distributed.plan import RowTable
from commons.extensions.padded import Padded
from commons.extensions.padded.padded_plan import plan_padded
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model

SHORT = "lognormal(4.2, 1.0) in [20, 200]"
_KNOWN = list_lengths(None)
KINDS: dict[str, Lengths] = {
    SHORT: lambda rng, n: rng.lognormal(4.2, 1.0, n).clip(20, 200).astype(np.int64),
    "Yambda-like, newest 8,192": lambda rng, n: _KNOWN[YAMBDA](rng, n).clip(max=8192),
    "uniform in [1, 4096]": lambda rng, n: rng.integers(1, 4097, n),
    "KuaiRand-like, newest 4,096": lambda rng, n: _KNOWN[KUAIRAND](rng, n).clip(max=4096),
}
# Computed plans.
PLANNED_RANKS, PLANNED_WIDTH, DRAWS, MAX_REAL_TOKENS = (2, 8, 64), 256, 200, 1.3
BYTES_PER_TOKEN = 16  # an id and a label
# Training.
RANKS, WARM_UP_STEPS, STEPS = 2, 2, 40
AS_LOADED, DEFAULT, PADDED = "as loaded", "default", "`Padded`"
WIDTH, HEADS, BLOCKS = 128, 2, 2
NUM_ITEMS = 20_000
LONGEST = 256  # lengths are divided so that the longest has this many items, at most
OPTIMIZER = OptimizerArgs("adagrad", 1e-3)


def count_flops(lengths: np.ndarray) -> np.ndarray:
    """Returns the forward FLOPs of each row by itself, int64 `[rows]`.

    A token costs six products with `WIDTH` × `WIDTH` matrices per block. Attention counts the visible half.
    """
    return BLOCKS * (12 * lengths * WIDTH**2 + 2 * lengths * (lengths + 1) * WIDTH)


def make_batch(lengths: np.ndarray, numbers: np.ndarray) -> BaseBatch:
    """Returns the samples with these numbers. Sample i has `lengths[i]` random items, drawn from seed i."""
    items, labels = [], []
    for number in numbers.tolist():
        rng = np.random.default_rng(number)
        items.append(rng.integers(0, NUM_ITEMS, lengths[number]))
        labels.append(rng.integers(0, 2, lengths[number]))
    features, targets = keyed_rows({"item": items}, len(items)), keyed_rows({"label": labels}, len(items))
    return BaseBatch(features, len(items), {"item": LONGEST}, labels=targets)


class FlopsShuffler(BatchShuffler):
    """Balances the FLOPs of rows."""

    unit = "FLOPs"

    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        """Returns `count_flops` of each row."""
        return torch.from_numpy(count_flops(batch.features.lengths().numpy()))


class PaddedModel(nn.Module):
    """Embeds items, encodes histories, and returns the sum of the losses of their items."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(NUM_ITEMS, WIDTH, "item", feature_names=["item"])
        self.embeddings = EmbeddingCollection([table], device=torch.device("meta"))
        self.encoder = _Encoder()

    def forward(self, batch: BaseBatch) -> tuple[torch.Tensor, None]:
        """Returns the loss sum, and no output."""
        return self.encoder(self.embeddings(batch.features)["item"], batch.labels), None


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = nn.Embedding(LONGEST, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.Sequential(*(_Block() for _ in range(BLOCKS)))

    def forward(self, embedded: JaggedTensor, labels: KeyedJaggedTensor) -> torch.Tensor:
        hidden = embedded.to_padded_dense()  # [rows, longest, width]
        positions = torch.arange(hidden.shape[1])
        is_real = positions < embedded.lengths()[:, None]
        logits = self.head(self.blocks(hidden + self.positions(positions))[is_real]).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, labels.values().float(), reduction="sum")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Encodes `[rows, longest, width]`. Attention is causal, so padding at the end changes no item."""
        q, k, v = (
            self.qkv(self.norms[0](hidden)).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


def measure() -> Record:
    """Returns the figures of computed plans, and of training."""
    cases = list_cases(lengths=KINDS, ranks=PLANNED_RANKS)
    return {
        "plans": {"draws": DRAWS, "whole": measure_cases(cases, _measure_plans, "plans")},
        "training": run_on_ranks(RANKS, train, str(STEPS)),
    }


def _measure_plans(lengths: str, ranks: int) -> Record:
    """Returns each figure's mean over draws."""
    return average([assess(draw_rows(lengths, ranks, seed)) for seed in range(DRAWS)])


def draw_rows(lengths: str, ranks: int, seed: int) -> RowTable:
    """Returns a step of random rows of this kind, as planning sees it."""
    drawn = KINDS[lengths](np.random.default_rng([seed, ranks]), ranks * ROWS_PER_RANK)
    per_rank = np.full(ranks, ROWS_PER_RANK)
    return RowTable(
        batch_sizes=per_rank,
        num_loaded=per_rank,
        workloads=10 * drawn * PLANNED_WIDTH**2 + 4 * drawn**2 * PLANNED_WIDTH,
        tokens=drawn,
        loss_tokens=drawn,
        key_lengths=np.zeros((len(drawn), 0), dtype=np.int64),
        sample_bytes=BYTES_PER_TOKEN * drawn,
        ranks_per_node=RANKS_PER_NODE if ranks > RANKS_PER_NODE else None,
    )


def assess(rows: RowTable) -> Record:
    """Returns the figures of a step whose ranks run whole batches."""
    plan, limited = plan_padded(rows), plan_padded(rows, max_real_tokens=MAX_REAL_TOKENS)
    report, of_limited = (BalanceReport.of(each, False) for each in (plan, limited))
    return {
        "as_loaded": report.imbalance_before,
        "padded": report.imbalance_after,
        "padded_tokens": fullest(plan, plan.destination) / fullest(plan, rows.home),
        "fewest_rows": plan.num_placed.min(),
        "most_rows": plan.num_placed.max(),
        "real_tokens_as_loaded": report.token_imbalance_before,
        "real_tokens": report.token_imbalance_after,
        "limited": of_limited.imbalance_after,
        "limited_real_tokens": of_limited.token_imbalance_after,
        "samples_moved": report.samples_moved / len(rows.tokens),
        "bytes_moved": report.bytes_moved / report.bytes_loaded,
    }


def fullest(plan: ShufflePlan, rank_of: np.ndarray) -> int:
    """Returns the padded tokens of the fullest rank, if rows are on these ranks, int64 `[rows]`."""
    longest = np.zeros(plan.num_ranks, dtype=np.int64)
    np.maximum.at(longest, rank_of, plan.rows.tokens)
    return int((longest * np.bincount(rank_of, minlength=plan.num_ranks)).max())


def draw_lengths(lengths: str, count: int) -> np.ndarray:
    """Returns random lengths of this kind that fit the model, int64 `[count]`."""
    drawn = KINDS[lengths](np.random.default_rng(0), count)
    return np.maximum(drawn // find_divisor(lengths), 1)


def find_divisor(lengths: str) -> int:
    """Returns the number that lengths of this kind are divided by, a power of two."""
    longest = int(KINDS[lengths](np.random.default_rng(0), 10_000).max())
    return 1 << max(-(-longest // LONGEST) - 1, 0).bit_length()


def train(device: torch.device, steps: str) -> list[Record]:
    """Trains on this rank, and returns a record for each kind of lengths."""
    return measure_cases(list_cases(lengths=KINDS), partial(_train, device, int(steps)), "training")


def _train(device: torch.device, steps: int, lengths: str) -> Record:
    drawn = draw_lengths(lengths, (WARM_UP_STEPS + steps) * RANKS * ROWS_PER_RANK)
    loaded = np.arange(len(drawn)).reshape(WARM_UP_STEPS + steps, RANKS, ROWS_PER_RANK)
    shufflers = {
        AS_LOADED: FlopsShuffler(enabled=False),
        DEFAULT: FlopsShuffler(),
        PADDED: FlopsShuffler(equal_rows=False, extensions=[Padded()]),
    }
    mine = loaded[:, dist.get_rank()]
    arms = {
        name: _make_arm([make_batch(drawn, numbers) for numbers in mine], shuffler, device)
        for name, shuffler in shufflers.items()
    }
    train_in_turn(arms.values(), steps, warm_up_steps=WARM_UP_STEPS)
    return {
        "divisor": find_divisor(lengths),
        "steps": steps,
        "speedup_predicted": _predict_speedup(arms[PADDED].reports),
        "arms": {name: _compare(arms[AS_LOADED], arm) for name, arm in arms.items()},
    }


def _make_arm(batches: Iterable[BaseBatch], shuffler: FlopsShuffler, device: torch.device) -> Arm:
    """Returns a run of a new model."""
    torch.manual_seed(0)
    model, optimizer = shard_model(PaddedModel(), OPTIMIZER, device)
    pipeline = TrainPipelineFactory.create(
        "native", model, optimizer, device, batch_shuffler=shuffler, loss_reduction="sum"
    )
    return Arm(pipeline, batches)


def _predict_speedup(reports: Sequence[BalanceReport]) -> float:
    """Returns the speedup over all steps that their plans predict."""
    before, after = (
        sum(getattr(report, name) * report.job_total_load for report in reports)
        for name in ("job_imbalance_before", "job_imbalance_after")
    )
    return round(before / after, 4)


def _compare(base: Arm, arm: Arm) -> Record:
    """Returns an arm's times, and how its losses differ from those of `base`."""
    return {
        "ms": summarize([1e3 * each for each in arm.block_seconds], 1),
        **compare_times(base, arm),
        "loss_difference": arm.difference_of_losses(base),
    }


def tabulate_training(figures: Sequence[Record]) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    names = {"as_loaded": AS_LOADED, "default": DEFAULT, "padded": PADDED}
    records = [record | {key: record["arms"][name] for key, name in names.items()} for record in figures]
    return {
        "padded gains": make_table(records, _TRAINING),
        "padded steps": str(figures[0]["steps"]),
        "padded speedup": f"SASRec {{padded[speedup]:.2f}}× {_INTERVAL}".format(**records[0]),
    }


_INTERVAL = "({padded[speedup_interval][0]:.2f}–{padded[speedup_interval][1]:.2f})"
_TRAINING: dict[str, Cell] = {
    "lengths": "{lengths}",
    "as loaded, ms": "{as_loaded[ms][median]:.0f}",
    "default, ms": "{default[ms][median]:.0f}",
    "`Padded`, ms": "{padded[ms][median]:.0f}",
    "speedup": f"{{padded[speedup]:.2f}} {_INTERVAL}",
    "predicted": "{speedup_predicted:.2f}",
}


def tabulate_plans(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker. Cells list numbers of ranks."""
    whole = [record | {"speedup": record["as_loaded"] / record["padded"]} for record in figures["whole"]]
    return {
        "padded balance": join_rows(whole, {"lengths": "{lengths}"}, _BALANCE),
        "padded side effects": join_rows(whole, {"lengths": "{lengths}"}, _SIDE_EFFECTS),
        "padded draws": f"{figures['draws']} draws",
    }


_BALANCE = {
    "as loaded": "{as_loaded:.2f}",
    "`Padded`": "{padded:.2f}",
    "speedup, at most": "{speedup:.1f}",
    "fullest": "{padded_tokens:.2f}",
    "rows per rank": "{fewest_rows:.0f}–{most_rows:.0f}",
}
_SIDE_EFFECTS = {
    "real tokens, as loaded": "{real_tokens_as_loaded:.2f}",
    "real tokens": "{real_tokens:.2f}",
    "samples moved": "{samples_moved:.0%}",
    "bytes moved": "{bytes_moved:.0%}",
    "limited: real tokens": "{limited_real_tokens:.2f}",
    "limited: imbalance": "{limited:.2f}",
}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    return {**tabulate_plans(figures["plans"]), **tabulate_training(figures["training"])}
