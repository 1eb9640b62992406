"""Parses the command line, and reads the files that it names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import NAME
from ..local_paths import local_path
from ..perf_model import HSTUFlops, TransformerConfig, transformer_work
from . import InputError
from .files import read_lengths
from .pieces import PieceCosts
from .prediction import FEWEST_STEPS, SAMPLES_TO_DRAW, Network
from .public_data import PUBLIC_DATA, SEED
from .samples import (
    TOKEN_RULES,
    ConfiguredModel,
    SampleCost,
    SampleLengths,
    TokenRule,
    cost_from_file,
    flops_cost,
)
from .strategies import LEARNED

if TYPE_CHECKING:
    from ..training.advisor_gin import GinRun

# Numbers of ranks in the page's chart. Those that need more samples than the data has are left out.
CHART_RANKS = [2**power for power in range(1, 11)]
GIN = ".gin"
_DEFAULT_ROWS = 32
_DIMENSIONS = ("hidden_size", "num_layers", "num_heads")


@dataclass(frozen=True)
class Request:
    """A request for predictions, one for each pair of `ranks` and `rows_per_rank`.

    `gin_settings` holds the `TrainerArgs` settings of the run's gin file. It is empty without a gin file, and
    None for a model that gin files do not configure.
    """

    samples: SampleLengths
    cost: SampleCost
    ranks: list[int]
    rows_per_rank: list[int]
    bytes_per_item: int
    network: Network
    gin_settings: dict[str, object] | None
    as_json: bool
    html: Path | None


def _count(text: str, least: int = 1) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}; expected at least {least}")
    return int(text)


def _counts(text: str) -> list[int]:
    """Parses comma-separated numbers, and drops repeated ones."""
    return list(dict.fromkeys(_count(part) for part in text.split(",")))


_COUNT: dict[str, Any] = {"type": _count, "metavar": "N"}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    description = "Predicts what balancing would gain on your own sequence lengths."
    made = argparse.ArgumentParser(prog="balance-advisor", description=description)
    _add_data_and_model(made)
    _add_run_and_output(made)
    return made


def _add_data_and_model(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("sequence lengths")
    source = group.add_mutually_exclusive_group(required=True).add_argument
    data = "a .npy, .csv, .csv.gz or .parquet file of lengths, or a gin file that configures a dataset"
    source("data", type=local_path, nargs="?", help=data)
    public = f"lengths that match published figures of {', '.join(PUBLIC_DATA)}"
    source("--lengths-of", metavar="NAME", choices=PUBLIC_DATA, help=public)
    add = group.add_argument
    add("--max-length", **_COUNT, help="newest events that training keeps")
    add("--column", help="column of a .csv or .parquet file: lengths, or lists in .parquet")
    per_item = "default: 2 for hstu (item and action), 3 for sid_gr (codes), else 1"
    add("--tokens-per-item", **_COUNT, help=per_item)
    extra = "extra tokens of each sample; default: 1 for hstu, else 0"
    add("--extra-tokens", type=partial(_count, least=0), metavar="N", help=extra)

    group = made.add_argument_group("model, unless a gin file given as data has one")
    add = group.add_argument
    add("--model", help=f"{', '.join(TOKEN_RULES)}, or a gin file")
    for name in _DIMENSIONS:
        add(_option_of(name), **_COUNT)
    add("--head-dim", **_COUNT, help="default: hidden size ÷ heads")
    add("--mlp-size", **_COUNT, help="MLP width of transformer and sid_gr; default: 4 × hidden size")
    times = group.add_mutually_exclusive_group().add_argument
    cost = "cost that a calibration measured or a run learned, in place of the model's FLOPs"
    times("--cost", type=local_path, metavar="FILE", help=cost)
    tflops = "TFLOP/s that a device achieves in training; predicts seconds in addition to ratios"
    times("--tflops", type=_positive, help=tflops)
    add("--gin-bindings", nargs="*", action="extend", default=[], help="as in training")


def _add_run_and_output(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("training run").add_argument
    add("--ranks", type=_counts, default=[8], metavar="N,…", help="default: 8")
    rows = f"default: {_DEFAULT_ROWS}, or the gin file's train_batch_size"
    add("--rows-per-rank", type=_counts, metavar="N,…", help=rows)
    bandwidth = "bandwidth of one rank for the exchange; default: 12.5, a 100 Gbit/s link per rank"
    add("--bandwidth", type=_positive, default=12.5, metavar="GB/s", help=bandwidth)
    add("--ranks-per-node", **_COUNT, help="ranks in a node, within which bytes take no time")
    item_bytes = "bytes per item of all exchanged fields; default: 24, three int64"
    add("--bytes-per-item", **_COUNT, default=24, help=item_bytes)

    add = made.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--html", type=local_path, metavar="FILE", help="also write a page with charts")


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text}; expected a number above 0")
    return float(text)


def _option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_request(argv: Sequence[str] | None) -> Request:
    """Reads the command line and the files that it names.

    Raises:
        InputError: something is missing, malformed, or out of range.
        SystemExit: argparse rejects the command line.
    """
    given = parser().parse_args(argv)
    gin_run = _gin_run(given)
    model = _model(given, gin_run)
    settings: dict[str, Any] = {} if gin_run is None else gin_run.settings()
    rows = given.rows_per_rank or [settings.get("train_batch_size", _DEFAULT_ROWS)]
    cost_file, balance_cost = given.cost, None
    if gin_run is not None and given.data is not None and given.data.suffix == GIN:
        samples = gin_run.lengths(_num_random(given, rows))
        if cost_file is None and "balance_cost" in settings:
            cost_file, balance_cost = gin_run.cost_file(), settings["balance_cost"]
    else:
        samples = _samples(given, model, _num_random(given, rows))
    cost = flops_cost(model, given.tflops) if cost_file is None else cost_from_file(cost_file, model)
    if balance_cost == LEARNED:
        missing = "" if cost_file else ". No run of this gin file has written what it learned"
        cost = replace(cost, setting=LEARNED, assumption=cost.assumption + missing)
    return Request(
        samples=samples,
        cost=cost,
        ranks=given.ranks,
        rows_per_rank=rows,
        bytes_per_item=given.bytes_per_item,
        network=Network(given.bandwidth * 1e9, given.ranks_per_node),
        gin_settings=None if gin_run is None and given.model == "transformer" else settings,
        as_json=given.json,
        html=given.html,
    )


def _gin_run(given: argparse.Namespace) -> GinRun | None:
    """Parses the gin file among the arguments, if there is one. Refuses options that it would override."""
    has_data = given.data is not None and given.data.suffix == GIN
    has_model = given.model not in TOKEN_RULES
    if not has_data and not (has_model and (given.model or "").endswith(GIN)):
        return None
    without_effect = [*_DIMENSIONS, "head_dim", "mlp_size"] if has_model else []
    if has_data:
        without_effect += ["max_length", "tokens_per_item", "extra_tokens", *(["model"] if has_model else [])]
    for name in without_effect:
        if getattr(given, name) is not None:
            raise InputError(f"{_option_of(name)} {getattr(given, name)} has no effect: the gin file has it")
    path = given.data if has_data else Path(given.model)
    if NAME != "commons":  # the wheel has neither our trainer nor our models
        raise InputError(
            f"{path} configures a model of the checkout: run python -m commons.advisor there, with the same "
            "options"
        )
    from ..training.advisor_gin import GinRun  # imports gin and TorchRec

    return GinRun.parse(path, given.gin_bindings)


def _model(given: argparse.Namespace, gin_run: GinRun | None) -> ConfiguredModel:
    """Returns the model that the command line names, or else the gin file's model."""
    if given.model in TOKEN_RULES:
        return _named_model(given)
    if gin_run is None:
        raise InputError(
            f"--model {given.model}; expected {', '.join(TOKEN_RULES)} with its dimensions, or a gin file"
        )
    return gin_run.model()


def _named_model(given: argparse.Namespace) -> ConfiguredModel:
    missing = [_option_of(name) for name in _DIMENSIONS if getattr(given, name) is None]
    if missing:
        raise InputError(f"--model {given.model} needs {', '.join(missing)} as well")
    layers, hidden, heads = given.num_layers, given.hidden_size, given.num_heads
    if given.head_dim is None and hidden % heads:
        raise InputError(
            f"--num-heads {heads} does not divide --hidden-size {hidden}; expected --head-dim as well"
        )
    head_dim = given.head_dim or hidden // heads
    description = f"{layers} layers of width {hidden}, {heads} heads of {head_dim}"
    tokens = TOKEN_RULES[given.model]
    if given.model == "hstu":
        flops = HSTUFlops(layers, hidden, heads, head_dim)
        pieces = PieceCosts(flops.prefix_work, layers, heads, head_dim)
        return ConfiguredModel(flops.work, f"HSTU, {description}", tokens, pieces)
    mlp_size = given.mlp_size or 4 * hidden
    work = partial(transformer_work, TransformerConfig(layers, hidden, heads, heads, head_dim, mlp_size))
    name = "SID-GR" if given.model == "sid_gr" else "Transformer decoder"
    pieces = PieceCosts(lambda first, _: work(first), layers, heads, head_dim)
    return ConfiguredModel(work, f"{name}, {description}, MLP of {mlp_size}", tokens, pieces)


def _num_random(given: argparse.Namespace, rows: Sequence[int]) -> int:
    """Returns the number of random samples in one epoch, enough for all steps and for the page's chart."""
    charted = CHART_RANKS[-1] * rows[0] if given.html is not None else 0
    return max(SAMPLES_TO_DRAW, FEWEST_STEPS * max(given.ranks) * max(rows), charted)


def _samples(given: argparse.Namespace, model: ConfiguredModel, num_random: int) -> SampleLengths:
    """Returns the samples of a file of lengths, or `num_random` samples with published lengths."""
    if given.lengths_of is None:
        items, source, origin = read_lengths(given.data, given.column), str(given.data), None
    else:
        published = PUBLIC_DATA[given.lengths_of]
        items = published.draw(np.random.default_rng(SEED), num_random)
        source, origin = f"as published of {published.title}", published.describe()
    if given.max_length is not None:
        items, source = items.clip(max=given.max_length), f"{source}, newest {given.max_length:,}"
    extra = model.tokens.extra if given.extra_tokens is None else given.extra_tokens
    rule = TokenRule(given.tokens_per_item or model.tokens.per_item, extra)
    return SampleLengths(items, rule.of(items), str(rule), source, origin)
