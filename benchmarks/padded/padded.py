"""Measures `Padded`: computed loads of its plans, steps of two ranks that train, and eight ranks replayed.

The model is a small SASRec, which predicts a label of each item from the items up to it. All its shapes
follow the lengths of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
    compare_times,
    list_cases,
    measure_cases,
    run_on_ranks,
    summarize,
    take_turns,
    time_ms,
    train_in_turn,
)
from benchmarks.markdown import Cell, make_table
from benchmarks.padded.plans import KINDS, SHORT, load_rows, measure_plans, tabulate_plans
from benchmarks.partition.placements import ROWS_PER_RANK
from commons.datasets import BucketSampler
from commons.datasets.sample_source import keyed_rows
from commons.distributed import BalanceReport, BatchShuffler, ShufflePlan, ShufflerSettings
from commons.distributed.placement import place, place_at_home
from commons.distributed.plan import RowTable
from commons.extensions.padded import Padded
from commons.extensions.padded.padded_plan import plan_padded
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model

RANKS, WARM_UP_STEPS, STEPS = 2, 2, 40
BUCKETS = 16  # of loading by length
REPLAYED_RANKS, REPLAYED_STEPS = 8, 5
PASSES = 2  # of each replayed rank's rows; the faster one counts
AS_LOADED, DEFAULT, PADDED = "as loaded", "default", "`Padded`"
BY_LENGTH, JAGGED = "loaded by length", "jagged, default"
PLANS: dict[str, Callable[[RowTable], ShufflePlan]] = {
    AS_LOADED: place_at_home,
    DEFAULT: lambda rows: place(rows, ShufflerSettings()),
    PADDED: plan_padded,
}
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
    """Embeds items, encodes histories, and returns the sum of the losses of their items.

    Args:
        pads: whether the rows of a batch are padded to the longest of them. If not, only attention goes row
            by row, and everything else runs on all items of the batch at once.
    """

    def __init__(self, pads: bool = True) -> None:
        super().__init__()
        table = EmbeddingConfig(NUM_ITEMS, WIDTH, "item", feature_names=["item"])
        self.embeddings = EmbeddingCollection([table], device=torch.device("meta"))
        self.encoder = _Encoder(pads)

    def forward(self, batch: BaseBatch) -> tuple[torch.Tensor, None]:
        """Returns the loss sum, and no output."""
        return self.encoder(self.embeddings(batch.features)["item"], batch.labels), None


class _Encoder(nn.Module):
    def __init__(self, pads: bool) -> None:
        super().__init__()
        self.pads = pads
        self.positions, self.head = nn.Embedding(LONGEST, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))

    def forward(self, embedded: JaggedTensor, labels: KeyedJaggedTensor) -> torch.Tensor:
        lengths = embedded.lengths()
        if self.pads:
            hidden = embedded.to_padded_dense()  # [rows, longest, width]
            positions = torch.arange(hidden.shape[1])
            is_real = positions < lengths[:, None]
        else:
            hidden = embedded.values()
            positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        hidden = hidden + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, lengths)
        if self.pads:
            hidden = hidden[is_real]
        logits = self.head(hidden).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, labels.values().float(), reduction="sum")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Encodes `[rows, longest, width]`, or `[items, width]` without padding."""
        qkv = self.qkv(self.norms[0](hidden))
        if hidden.dim() == 3:
            attended = _attend(qkv)
        else:
            attended = torch.cat([_attend(row[None])[0] for row in qkv.split(lengths.tolist())])
        hidden = hidden + self.out(attended)
        return hidden + self.mlp(self.norms[1](hidden))


def _attend(qkv: torch.Tensor) -> torch.Tensor:
    """Returns causal attention, `[rows, longest, width]`, so padding at the end of a row changes no item."""
    q, k, v = qkv.unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def measure() -> Record:
    """Returns the figures of all parts."""
    return {
        "plans": measure_plans(),
        "training": run_on_ranks(RANKS, train, str(STEPS)),
        "replay": run_on_ranks(1, replay, str(REPLAYED_STEPS)),
    }


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
    makers: dict[str, Callable[[], Arm]] = {
        AS_LOADED: lambda: _make_arm(drawn, loaded, FlopsShuffler(enabled=False), device),
        DEFAULT: lambda: _make_arm(drawn, loaded, FlopsShuffler(), device),
        PADDED: lambda: _make_arm(
            drawn, loaded, FlopsShuffler(equal_rows=False, extensions=[Padded()]), device
        ),
    }
    if lengths == SHORT:
        timed = loaded[WARM_UP_STEPS:].reshape(-1)
        by_length = [[timed[part] for part in step] for step in load_by_length(count_flops(drawn[timed]))]
        steps_by_length = [*loaded[:WARM_UP_STEPS], *by_length]
        makers[BY_LENGTH] = lambda: _make_arm(drawn, steps_by_length, FlopsShuffler(enabled=False), device)
        makers[JAGGED] = lambda: _make_arm(drawn, loaded, FlopsShuffler(), device, pads=False)
    arms = {name: make() for name, make in makers.items()}
    train_in_turn(arms.values(), steps, warm_up_steps=WARM_UP_STEPS)
    return {
        "divisor": find_divisor(lengths),
        "steps": steps,
        "speedup_predicted": _predict_speedup(arms[PADDED].reports),
        "arms": {name: _compare(arms[AS_LOADED], arm, name != BY_LENGTH) for name, arm in arms.items()},
    }


def load_by_length(workloads: np.ndarray) -> list[list[np.ndarray]]:
    """Returns an epoch in steps of like workloads: the numbers of each rank's samples, for each step."""
    samplers = [
        BucketSampler(workloads, ROWS_PER_RANK, rank, RANKS, BUCKETS, last="keep") for rank in range(RANKS)
    ]
    return [[np.array(batch) for batch in step] for step in zip(*samplers, strict=True)]


def _make_arm(
    lengths: np.ndarray,
    steps: Iterable[Sequence[np.ndarray]],
    shuffler: FlopsShuffler,
    device: torch.device,
    pads: bool = True,
) -> Arm:
    """Returns a run of a new model on this rank's samples of each step."""
    torch.manual_seed(0)
    model, optimizer = shard_model(PaddedModel(pads), OPTIMIZER, device)
    pipeline = TrainPipelineFactory.create(
        "native", model, optimizer, device, batch_shuffler=shuffler, loss_reduction="sum"
    )
    return Arm(pipeline, [make_batch(lengths, step[dist.get_rank()]) for step in steps])


def _predict_speedup(reports: Sequence[BalanceReport]) -> float:
    """Returns the speedup over all steps that their plans predict."""
    before, after = (
        sum(getattr(report, name) * report.job_total_load for report in reports)
        for name in ("job_imbalance_before", "job_imbalance_after")
    )
    return round(before / after, 4)


def _compare(base: Arm, arm: Arm, has_same_steps: bool) -> Record:
    """Returns an arm's times, and how its losses differ from those of `base`."""
    totals = [float(report.workloads.sum()) for report in arm.reports]
    return {
        "ms": summarize([1e3 * each for each in arm.block_seconds], 1),
        **compare_times(base, arm),
        "loss_difference": arm.difference_of_losses(base) if has_same_steps else None,
        "largest_step": round(max(totals) / np.mean(totals).item(), 3),
    }


def replay(device: torch.device, steps: str) -> list[Record]:
    """Computes the rows of eight ranks, one after another, and returns a record for each kind of lengths."""
    torch.manual_seed(0)
    model, _ = shard_model(PaddedModel(), OPTIMIZER, device)
    return measure_cases(list_cases(lengths=KINDS), partial(_replay, model, int(steps)), "replay")


def _replay(model: torch.nn.Module, num_steps: int, lengths: str) -> Record:
    """Returns the seconds of each arm, `[step][rank]`, and the speedup that plans predict."""
    drawn = draw_lengths(lengths, num_steps * REPLAYED_RANKS * ROWS_PER_RANK)
    steps = list(np.arange(len(drawn)).reshape(num_steps, -1))
    rows = [load_rows(drawn[numbers], count_flops(drawn[numbers])) for numbers in steps]
    seconds: dict[str, list[list[float]]] = {name: [] for name in PLANS}
    _time_pass(model, make_batch(drawn, steps[0][:ROWS_PER_RANK]))  # warms up
    for name in take_turns(PLANS, num_steps):
        number = len(seconds[name])
        plan = PLANS[name](rows[number])
        parts = [make_batch(drawn, steps[number][plan.computed_by(rank)]) for rank in range(REPLAYED_RANKS)]
        seconds[name].append([min(_time_pass(model, part) for _ in range(PASSES)) for part in parts])
    plans = [plan_padded(each) for each in rows]
    before, after = (sum(getattr(plan, of).max() for plan in plans) for of in ("loads_before", "loads"))
    return {"seconds": seconds, "speedup_predicted": round(before / after, 4)}


def _time_pass(model: torch.nn.Module, batch: BaseBatch) -> float:
    """Returns the CPU seconds of one forward and backward pass."""
    model.zero_grad()
    return round(time_ms(lambda: model(batch)[0].backward(), time.process_time) / 1e3, 5)


def tabulate_training(figures: Sequence[Record]) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    first = next(record for record in figures if record["lengths"] == SHORT)
    beside = [arm | {"name": name} for name, arm in first["arms"].items()]
    gains = ("lengths", "as loaded, ms", "default, ms", "`Padded`, ms", "speedup")
    return {
        "padded training": make_table(map(_flatten, figures), _TRAINING),
        "padded gains": make_table(map(_flatten, figures), {name: _TRAINING[name] for name in gains}),
        "padded beside": make_table(beside, _BESIDE),
        "padded steps": str(first["steps"]),
    }


_SPEEDUP = "{speedup:.2f} ({speedup_interval[0]:.2f}–{speedup_interval[1]:.2f})"
_TRAINING: dict[str, Cell] = {
    "lengths": "{lengths}",
    "÷": "{divisor}",
    "as loaded, ms": "{as_loaded[ms][median]:.0f}",
    "default, ms": "{default[ms][median]:.0f}",
    "`Padded`, ms": "{padded[ms][median]:.0f}",
    "speedup": lambda record: _SPEEDUP.format_map(record["padded"]),
    "predicted": "{speedup_predicted:.2f}",
    "ratio": lambda record: f"{record['padded']['speedup'] / record['speedup_predicted']:.2f}",
    "largest difference of a loss": lambda record: _show_difference(record["padded"]),
}
_BESIDE: dict[str, Cell] = {
    "on the first lengths": "{name}",
    "step, ms": "{ms[median]:.0f} ({ms[min]:.0f}–{ms[max]:.0f})",
    "speedup": _SPEEDUP,
    "work of the largest step ÷ mean": "{largest_step:.2f}",
    "largest difference of a loss": lambda arm: _show_difference(arm),
}


def _show_difference(arm: Record) -> str:
    difference = arm["loss_difference"]
    return "other steps" if difference is None else f"{difference:.0e}" if difference else "0"


def _flatten(record: Record) -> Record:
    """Returns a record with the arms of all kinds of lengths."""
    names = {"as_loaded": AS_LOADED, "default": DEFAULT, "padded": PADDED}
    return record | {key: record["arms"][name] for key, name in names.items()}


def tabulate_replay(figures: Sequence[Record]) -> dict[str, str]:
    """Returns the Markdown for each marker. A step takes as long as its slowest rank."""
    shown = []
    for record in figures:
        times = {name: np.array(record["seconds"][name]) for name in PLANS}
        slowest = {name: of.max(1).sum() for name, of in times.items()}
        cells = {
            f"{name} (waiting)": f"{slowest[name]:.1f} s ({1 - of.mean(1).sum() / slowest[name]:.0%})"
            for name, of in times.items()
        }
        speedups = slowest[AS_LOADED] / slowest[PADDED], record["speedup_predicted"]
        cells |= {name: f"{each:.2f}" for name, each in zip(("speedup", "predicted"), speedups, strict=True)}
        shown.append({"lengths": record["lengths"], **cells})
    columns = {title: f"{{{title}}}" for title in shown[0]}
    steps = str(len(figures[0]["seconds"][PADDED]))
    return {"padded replay": make_table(shown, columns), "padded replayed steps": steps}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    return {
        **tabulate_plans(figures["plans"]),
        **tabulate_training(figures["training"]),
        **tabulate_replay(figures["replay"]),
    }
