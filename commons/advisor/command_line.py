"""Parses the command line, and reads the files that it names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..local_paths import local_path
from ..perf_model import HSTUFlops, TransformerConfig, transformer_work
from . import InputError
from .option_checks import DIMENSIONS, GIN, check_options, option_of
from .pieces import PieceCosts
from .public_data import PUBLIC_DATA, SEED
from .samples import (
    TOKEN_RULES,
    ConfiguredModel,
    SampleCost,
    SampleLengths,
    TokenRule,
    cost_from_file,
    flops_cost,
    read_lengths,
)

if TYPE_CHECKING:
    from .gin_file import GinRun
    from .prediction import Network

# Numbers of ranks in the page's chart. Those that need more samples than the data has are left out.
CHART_RANKS = [2**power for power in range(1, 11)]
# Models of TOKEN_RULES that gin files configure.
IN_GIN = ("hstu", "sid_gr")
_DEFAULT_ROWS = 32
_LARGEST_STEP = 2**22  # samples
_LARGEST_COUNT = 2**20  # products of counts still fit int64
_EXAMPLE = (
    "balance-advisor lengths.npy --model hstu --hidden-size 256 --num-layers 4 --num-heads 4 --ranks 8,64"
)


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parser() -> argparse.ArgumentParser:
    """Returns the parser; it raises InputError if an argument is malformed or out of range."""
    made = _Parser(
        prog="balance-advisor",
        description="Predicts what balancing would gain on your own sequence lengths.",
        epilog=f"Example: {_EXAMPLE}",
    )
    _add_data_and_model(made)
    _add_run_and_output(made)
    return made


def _add_data_and_model(made: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": _count, "metavar": "N"}
    add = made.add_argument_group("sequence lengths").add_argument
    data = "a .npy, .csv, .csv.gz or .parquet file of lengths, or a gin file that configures a dataset"
    add("data", type=local_path, nargs="?", help=data)
    public = f"in place of data: lengths that match published figures of {', '.join(PUBLIC_DATA)}"
    add("--lengths-of", metavar="NAME", help=public)
    add("--max-length", **count, help="newest events that training keeps; with --lengths-of")
    add("--column", help="column of a .csv or .parquet file: lengths, or lists in .parquet")
    ids = "column of lists in .parquet: counts unique ids per rank; steps then follow the file's order"
    add("--ids", metavar="COLUMN", help=ids)
    groups = "column of integers, such as users: compares keeping groups together; steps as with --ids"
    add("--groups", metavar="COLUMN", help=groups)
    per_item = "default: 2 for hstu (item and action), 3 for sid_gr (codes), else 1"
    add("--tokens-per-item", **count, help=per_item)
    extra = "extra tokens of each sample; default: 1 for hstu, else 0"
    add("--extra-tokens", type=partial(_count, least=0), metavar="N", help=extra)

    add = made.add_argument_group("model, unless a gin file given as data has one").add_argument
    add("--model", help=f"{', '.join(TOKEN_RULES)}, or a gin file")
    for name in DIMENSIONS:
        add(option_of(name), **count)
    add("--head-dim", **count, help="default: hidden size ÷ heads")
    add("--mlp-size", **count, help="MLP width of transformer and sid_gr; default: 4 × hidden size")
    cost = "cost that a calibration measured or a run learned, in place of the model's FLOPs"
    add("--cost", type=local_path, metavar="FILE", help=cost)
    tflops = "TFLOP/s that a device achieves in training; predicts seconds in addition to ratios"
    add("--tflops", type=_positive, help=tflops)
    add("--gin-bindings", nargs="*", action="extend", default=[], help="as in training")


def _add_run_and_output(made: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": _count, "metavar": "N"}
    add = made.add_argument_group("training run").add_argument
    add("--ranks", type=_counts, default=[8], metavar="N,…", help="default: 8")
    rows = f"default: {_DEFAULT_ROWS}, or the gin file's train_batch_size"
    add("--rows-per-rank", type=_counts, metavar="N,…", help=rows)
    bandwidth = "bandwidth of one rank for the exchange; default: 12.5, a 100 Gbit/s link per rank"
    add("--bandwidth", type=_positive, default=12.5, metavar="GB/s", help=bandwidth)
    add("--ranks-per-node", **count, help="ranks in a node, within which bytes take no time")
    item_bytes = "bytes per item of all exchanged fields; default: 24, three int64"
    add("--bytes-per-item", **count, default=24, help=item_bytes)

    add = made.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--html", type=local_path, metavar="FILE", help="also write a page with charts")


def _count(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= _LARGEST_COUNT:
        limit = f" and at most {_LARGEST_COUNT}" if value > _LARGEST_COUNT else ""
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least {least}{limit}")
    return value


def _counts(text: str) -> list[int]:
    """Parses comma-separated numbers, and drops repeated ones."""
    return list(dict.fromkeys(_count(part) for part in text.split(",")))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0, from 1e-9 to 1e9")
    return value


def parse_request(argv: Sequence[str] | None) -> Request:
    """Reads the command line and the files that it names.

    Raises:
        InputError: something is missing, malformed, or out of range.
    """
    given = parser().parse_args(argv)
    check_options(given)
    gin_run = _gin_run(given)
    model = _model(given, gin_run)
    settings: dict[str, Any] = {} if gin_run is None else gin_run.settings()
    rows = given.rows_per_rank or [settings.get("train_batch_size", _DEFAULT_ROWS)]
    largest_step = max(given.ranks) * max(rows)
    if largest_step > _LARGEST_STEP:
        raise InputError(
            f"{max(given.ranks)} ranks × {max(rows)} rows; expected at most {_LARGEST_STEP} in a step"
        )
    cost_file, balance_cost = given.cost, None
    if given.lengths_of is not None:
        samples = _samples_as_published(given, model, _num_random(given, rows))
    elif gin_run is not None and given.data.suffix == GIN:
        samples = gin_run.lengths(_num_random(given, rows))
        if cost_file is None and "balance_cost" in settings:
            cost_file, balance_cost = gin_run.cost_file(), settings["balance_cost"]
    else:
        samples = _samples_of_file(given, model)
    # Imported late: these modules import numba, and reading the file takes less memory without it.
    from .prediction import Network
    from .strategies import LEARNED

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
        gin_settings=settings if gin_run is not None or given.model in IN_GIN else None,
        as_json=given.json,
        html=given.html,
    )


def _gin_run(given: argparse.Namespace) -> GinRun | None:
    for path in (given.data, local_path(given.model or "")):
        if path is not None and path.suffix == GIN:
            from .gin_file import GinRun  # imports gin; parsing imports TorchRec, too

            return GinRun.parse(path, given.gin_bindings)
    if given.gin_bindings:
        raise InputError(f"--gin-bindings {given.gin_bindings[0]} has no effect without a gin file")
    return None


def _model(given: argparse.Namespace, gin_run: GinRun | None) -> ConfiguredModel:
    """Returns the model that the command line names, or else the gin file's model."""
    if given.model in TOKEN_RULES:
        return _named_model(given)
    model = None if gin_run is None else gin_run.model()
    if model is None:
        raise InputError(
            f"no model; expected --model {'|'.join(TOKEN_RULES)} with its dimensions, or --model FILE.gin"
        )
    return model


def _named_model(given: argparse.Namespace) -> ConfiguredModel:
    missing = [option_of(name) for name in DIMENSIONS if getattr(given, name) is None]
    if missing:
        raise InputError(f"--model {given.model} needs {', '.join(missing)} as well")
    layers, hidden, heads = given.num_layers, given.hidden_size, given.num_heads
    if given.head_dim is None and hidden % heads:
        raise InputError(
            f"--num-heads {heads} does not divide --hidden-size {hidden}; expected --head-dim as well"
        )
    head_dim = given.head_dim or hidden // heads
    description = f"{layers} layers of width {hidden}, {heads} heads of {head_dim}"
    if given.model == "hstu":
        flops = HSTUFlops(layers, hidden, heads, head_dim)
        pieces = PieceCosts(flops.prefix_work, layers, heads, head_dim)
        return ConfiguredModel(flops.work, f"HSTU, {description}", TOKEN_RULES[given.model], pieces)
    mlp_size = given.mlp_size or 4 * hidden
    work = partial(transformer_work, TransformerConfig(layers, hidden, heads, heads, head_dim, mlp_size))
    name = "SID-GR" if given.model == "sid_gr" else "Transformer decoder"
    pieces = PieceCosts(lambda first, _: work(first), layers, heads, head_dim)
    return ConfiguredModel(
        work, f"{name}, {description}, MLP of {mlp_size}", TOKEN_RULES[given.model], pieces
    )


def _num_random(given: argparse.Namespace, rows: Sequence[int]) -> int:
    """Returns the number of random samples in one epoch, enough for all steps and for the page's chart."""
    from .prediction import FEWEST_STEPS, SAMPLES_TO_DRAW

    charted = CHART_RANKS[-1] * rows[0] if given.html is not None else 0
    return max(SAMPLES_TO_DRAW, FEWEST_STEPS * max(given.ranks) * max(rows), charted)


def _samples_as_published(given: argparse.Namespace, model: ConfiguredModel, count: int) -> SampleLengths:
    published = PUBLIC_DATA[given.lengths_of]
    items = published.draw(np.random.default_rng(SEED), count)
    source = f"as published of {published.title}"
    if given.max_length is not None:
        items = items.clip(max=given.max_length)
        source += f", newest {given.max_length:,}"
    return _samples(given, model, items, source, origin=published.describe())


def _samples_of_file(given: argparse.Namespace, model: ConfiguredModel) -> SampleLengths:
    option = "--column" if given.column or not given.ids else "--ids"
    items = read_lengths(given.data, given.column or given.ids, option)
    ids = groups = None
    if given.ids is not None or given.groups is not None:
        from .columns import read_groups, read_ids  # imports polars

        ids = None if given.ids is None else read_ids(given.data, given.ids)
        groups = None if given.groups is None else read_groups(given.data, given.groups)
    source = str(given.data)
    return _samples(given, model, items, source, ids=ids, groups=groups, group_column=given.groups)


def _samples(
    given: argparse.Namespace, model: ConfiguredModel, items: np.ndarray, source: str, **known: Any
) -> SampleLengths:
    extra = model.tokens.extra if given.extra_tokens is None else given.extra_tokens
    rule = TokenRule(given.tokens_per_item or model.tokens.per_item, extra)
    return SampleLengths(items, rule.of(items), str(rule), source, **known)
