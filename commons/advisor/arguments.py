"""The command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from commons.advisor.input_error import InputError
from commons.advisor.lengths import TokenRule

# Tokens of a sample by model: HSTU has an action behind each item, and usually one token of the user; an item
# of SID-GR is three codes in most of what is published.
TOKEN_RULES = {"hstu": TokenRule(2, 1), "sid_gr": TokenRule(3, 0), "transformer": TokenRule(1, 0)}
DIMENSIONS = ("hidden_size", "num_layers", "num_heads")
OPTIONAL_DIMENSIONS = ("head_dim", "mlp_size")
DEFAULT_BANDWIDTH = 12.5  # GB/s, a 100 Gbit/s link for each rank
DEFAULT_BYTES_PER_ITEM = 24  # three int64 fields

_MOST = 2**20  # of what is counted; products of these still fit into int64

_EXAMPLE = (
    "balance-advisor lengths.npy --model hstu --hidden-size 256 --num-layers 4 --num-heads 4 --ranks 8,64"
)


def option(name: str) -> str:
    """An argument as it is written on the command line."""
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """One that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parser() -> argparse.ArgumentParser:
    """Of all arguments; it raises InputError where one is malformed or out of range."""
    made = _Parser(
        prog="balance-advisor",
        description="Predicts what balancing would gain on your own sequence lengths.",
        epilog=f"Example: {_EXAMPLE}",
    )
    _add_data(made.add_argument_group("sequence lengths"))
    _add_model(made.add_argument_group("model, unless the lengths are of a gin file, which has one"))
    _add_run(made.add_argument_group("training run"))
    output = made.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON on stdout instead of tables")
    output.add_argument("--html", type=Path, metavar="FILE", help="also write a page with charts")
    return made


def _add_data(data: argparse._ArgumentGroup) -> None:
    data.add_argument(
        "data", type=Path, help="a file of lengths, .npy, .csv or .parquet; or a gin file, for its dataset"
    )
    data.add_argument("--column", help="of the .csv or .parquet file; of lists in .parquet the lengths count")
    data.add_argument(
        "--tokens-per-item",
        type=_at_least_one,
        metavar="N",
        help="default: 2 for hstu (item and action), 3 for sid_gr (codes), else 1",
    )
    data.add_argument(
        "--extra-tokens", type=_at_least_zero, metavar="N", help="of each sample; default: 1 for hstu, else 0"
    )


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument("--model", help=f"{', '.join(TOKEN_RULES)}, or a gin file")
    for name in DIMENSIONS:
        model.add_argument(option(name), type=_at_least_one, metavar="N")
    model.add_argument("--head-dim", type=_at_least_one, metavar="N", help="default: hidden size ÷ heads")
    model.add_argument(
        "--mlp-size",
        type=_at_least_one,
        metavar="N",
        help="of transformer and sid_gr; default: 4 × hidden size",
    )
    model.add_argument(
        "--cost", type=Path, metavar="FILE", help="measured cost, as a calibration saves it, instead of FLOPs"
    )
    model.add_argument(
        "--tflops", type=_positive, help="what a device achieves in training, for seconds instead of ratios"
    )
    model.add_argument("--gin-bindings", nargs="*", action="extend", default=[], help="as in training")


def _add_run(run: argparse._ArgumentGroup) -> None:
    run.add_argument("--ranks", type=_counts, default=[8], metavar="N,…", help="default: 8")
    run.add_argument(
        "--rows-per-rank", type=_counts, metavar="N,…", help="default: 32, or the gin file's train_batch_size"
    )
    run.add_argument(
        "--window",
        type=_at_least_one,
        default=4,
        metavar="N",
        help="steps to show a window of; default: 4; 1 for none",
    )
    run.add_argument(
        "--bandwidth",
        type=_positive,
        default=DEFAULT_BANDWIDTH,
        metavar="GB/s",
        help=f"of one rank, for the exchange; default: {DEFAULT_BANDWIDTH}",
    )
    run.add_argument(
        "--ranks-per-node", type=_at_least_one, metavar="N", help="bytes within a node then take no time"
    )
    run.add_argument(
        "--bytes-per-item",
        type=_at_least_one,
        default=DEFAULT_BYTES_PER_ITEM,
        metavar="N",
        help=f"of all fields that are exchanged; default: {DEFAULT_BYTES_PER_ITEM}, three int64",
    )


def _at_least_one(text: str) -> int:
    return _integer(text, 1)


def _at_least_zero(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= _MOST:
        expected = f"a whole number of at least {least}" + (f" and at most {_MOST}" if value > _MOST else "")
        raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}")
    return value


def _counts(text: str) -> list[int]:
    """Numbers with commas between them, each once."""
    return list(dict.fromkeys(_at_least_one(part) for part in text.split(",")))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0, from 1e-9 to 1e9")
    return value
