"""What the user asks: the command line, and what the files say that it names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commons.advisor.arguments import DIMENSIONS, OPTIONAL_DIMENSIONS, TOKEN_RULES, option, parser
from commons.advisor.drawn_steps import FEWEST_STEPS, SAMPLES_TO_DRAW
from commons.advisor.gin_file import GinRun
from commons.advisor.input_error import InputError
from commons.advisor.lengths import SampleLengths, TokenRule, read_lengths
from commons.advisor.prediction import Network
from commons.advisor.sample_cost import (
    ConfiguredModel,
    SampleCost,
    decoder_flops,
    flops_cost,
    hstu_flops,
    measured_cost,
)

_GIN = ".gin"
_ITEMS_ARE_TOKENS = TokenRule(1, 0)
_DEFAULT_ROWS = 32
_LARGEST_STEP = 2**22  # samples
# Of the chart of the speedup over ranks; as many of them as the data has samples for.
CHART_RANKS = [2**power for power in range(1, 11)]


@dataclass(frozen=True)
class Request:
    """What is to be predicted.

    Attributes:
        samples: the data.
        cost: of a sample.
        ranks, rows_per_rank: all pairs of these.
        bytes_per_item: that the exchange moves.
        network: what it goes over.
        window: steps of a window; 1 for none.
        as_json: whether JSON is printed.
        html: a page to write, or None.
    """

    samples: SampleLengths
    cost: SampleCost
    ranks: list[int]
    rows_per_rank: list[int]
    bytes_per_item: int
    network: Network
    window: int
    as_json: bool
    html: Path | None


def parse_request(argv: Sequence[str] | None) -> Request:
    """Reads the command line and the files that it names.

    Raises:
        InputError: something is missing, malformed or out of range.
    """
    given = parser().parse_args(argv)
    _check_options(given)
    gin_run = _gin_run(given)
    model = _model(given, gin_run)
    data_is_gin = given.data.suffix == _GIN
    rows = given.rows_per_rank
    if rows is None:
        rows = [_DEFAULT_ROWS if gin_run is None else gin_run.rows_per_rank(_DEFAULT_ROWS)]
    most_ranks = max(given.ranks)
    if most_ranks * max(rows) > _LARGEST_STEP:
        raise InputError(f"{most_ranks} ranks × {max(rows)} rows; expected at most {_LARGEST_STEP} in a step")
    if gin_run is not None and data_is_gin:
        # As many as are drawn, so that random samples make one epoch; and enough for the chart.
        shown = CHART_RANKS[-1] * rows[0] if given.html is not None else 0
        samples = gin_run.lengths(max(SAMPLES_TO_DRAW, FEWEST_STEPS * most_ranks * max(rows), shown))
    else:
        named = TOKEN_RULES.get(given.model, _ITEMS_ARE_TOKENS)
        samples = _samples_of_file(given, named if model is None else model.tokens)
    return Request(
        samples=samples,
        cost=_cost(given, model, gin_run if data_is_gin else None),
        ranks=given.ranks,
        rows_per_rank=rows,
        bytes_per_item=given.bytes_per_item,
        network=Network(given.bandwidth * 1e9, given.ranks_per_node),
        window=given.window,
        as_json=given.json,
        html=given.html,
    )


def _check_options(given: argparse.Namespace) -> None:
    """Raises InputError for an unknown model, and for options that have no effect with the others."""
    model, is_named = given.model, given.model in TOKEN_RULES
    if not (model is None or is_named or model.endswith(_GIN)):
        raise InputError(f"--model {model}; expected one of {', '.join(TOKEN_RULES)}, or a gin file")
    for name in (*DIMENSIONS, *OPTIONAL_DIMENSIONS):
        if getattr(given, name) is not None and (given.cost is not None or not is_named):
            reason = "with --cost" if given.cost is not None else f"without --model {'|'.join(TOKEN_RULES)}"
            raise InputError(f"{option(name)} {getattr(given, name)} has no effect {reason}")
    if model == "hstu" and given.mlp_size is not None:
        raise InputError(f"--mlp-size {given.mlp_size} has no effect: HSTU layers have no MLP")
    if given.cost is not None and given.tflops is not None:
        raise InputError(f"--tflops {given.tflops:g} has no effect with --cost, which has times already")
    if given.html is not None and given.html.is_dir():
        raise InputError(f"--html {given.html} is a folder; expected a file to write")
    if given.html is not None and not given.html.parent.is_dir():
        raise InputError(f"--html {given.html}: there is no folder {given.html.parent}; make it first")
    if given.data.suffix != _GIN:
        return
    if model is not None and not is_named:
        raise InputError(f"--model {model}: {given.data} has a model; expected dimensions, or no --model")
    for name in ("column", "tokens_per_item", "extra_tokens"):
        if getattr(given, name) is not None:
            raise InputError(
                f"{option(name)} {getattr(given, name)} has no effect: {given.data} says what samples hold"
            )


def _gin_run(given: argparse.Namespace) -> GinRun | None:
    for path in (given.data, Path(given.model or "")):
        if path.suffix == _GIN:
            return GinRun.parse(path, given.gin_bindings)
    if given.gin_bindings:
        raise InputError(f"--gin-bindings {given.gin_bindings[0]} has no effect without a gin file")
    return None


def _model(given: argparse.Namespace, gin_run: GinRun | None) -> ConfiguredModel | None:
    """That of the command line, else of the gin file; None where there is neither, or times are given."""
    if given.model in TOKEN_RULES and given.cost is None:
        return _named_model(given)
    if given.model in TOKEN_RULES or gin_run is None:
        return None
    return gin_run.model()


def _cost(given: argparse.Namespace, model: ConfiguredModel | None, run: GinRun | None) -> SampleCost:
    """Of `--cost`, else what the gin file of the data balances by, else FLOPs."""
    file = given.cost if run is None or given.cost is not None else run.balance_cost()
    if file is not None:
        return measured_cost(file)
    if model is None:
        raise InputError(
            f"no model; expected --model {'|'.join(TOKEN_RULES)} with its dimensions, --model FILE.gin, or "
            "--cost FILE"
        )
    return flops_cost(model, given.tflops)


def _named_model(given: argparse.Namespace) -> ConfiguredModel:
    """Of the dimensions on the command line."""
    missing = [option(name) for name in DIMENSIONS if getattr(given, name) is None]
    if missing:
        raise InputError(f"--model {given.model} needs {', '.join(missing)} as well")
    layers, hidden, heads = given.num_layers, given.hidden_size, given.num_heads
    if given.head_dim is None and hidden % heads:
        raise InputError(
            f"--num-heads {heads} does not divide --hidden-size {hidden}; expected --head-dim, too"
        )
    head_dim = given.head_dim or hidden // heads
    layers_in_words = f"{layers} layers of width {hidden}, {heads} heads of {head_dim}"
    tokens = TOKEN_RULES[given.model]
    if given.model == "hstu":
        return ConfiguredModel(
            hstu_flops(layers, hidden, heads, head_dim), f"HSTU, {layers_in_words}", tokens
        )
    mlp_size = given.mlp_size or 4 * hidden
    name = "SID-GR" if given.model == "sid_gr" else "Transformer decoder"
    flops = decoder_flops(layers, hidden, heads, head_dim, mlp_size)
    return ConfiguredModel(flops, f"{name}, {layers_in_words}, MLP of {mlp_size}", tokens)


def _samples_of_file(given: argparse.Namespace, default: TokenRule) -> SampleLengths:
    items = read_lengths(given.data, given.column)
    rule = TokenRule(
        default.per_item if given.tokens_per_item is None else given.tokens_per_item,
        default.extra if given.extra_tokens is None else given.extra_tokens,
    )
    return SampleLengths(items, rule.of(items), str(rule), str(given.data))
