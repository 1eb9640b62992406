"""Rejects options of the command line that would have no effect."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import InputError
from .public_data import PUBLIC_DATA
from .samples import TOKEN_RULES

DIMENSIONS = ("hidden_size", "num_layers", "num_heads")
GIN = ".gin"


def option_of(name: str) -> str:
    """Returns the option that sets an attribute of the parsed arguments."""
    return "--" + name.replace("_", "-")


def check_options(given: argparse.Namespace) -> None:
    """Raises InputError for an unknown model, and for options that the other options leave without effect."""
    model, is_named = given.model, given.model in TOKEN_RULES
    _check_data(given)
    if not (model is None or is_named or model.endswith(GIN)):
        raise InputError(f"--model {model}; expected one of {', '.join(TOKEN_RULES)}, or a gin file")
    if not is_named:
        _refuse(given, (*DIMENSIONS, "head_dim", "mlp_size"), f" without --model {'|'.join(TOKEN_RULES)}")
    if model == "hstu":
        _refuse(given, ("mlp_size",), ": HSTU layers have no MLP")
    if given.cost is not None and given.tflops is not None:
        raise InputError(f"--tflops {given.tflops:g} has no effect with --cost, which has times already")
    if given.html is not None:
        _check_page(given)
    if given.data is not None and given.data.suffix == GIN:
        if model is not None and not is_named:
            raise InputError(f"--model {model}: {given.data} has a model; expected dimensions, or no --model")
        names = ("column", "ids", "groups", "tokens_per_item", "extra_tokens")
        _refuse(given, names, f": {given.data} defines its samples")


def _check_data(given: argparse.Namespace) -> None:
    """Raises InputError unless there is exactly one source of lengths, and its options have an effect."""
    name = given.lengths_of
    if name is None:
        if given.data is None:
            raise InputError("no data; expected a file of lengths, or --lengths-of " + "|".join(PUBLIC_DATA))
        _refuse(given, ("max_length",), " without --lengths-of")
        return
    if name not in PUBLIC_DATA:
        raise InputError(f"--lengths-of {name}; expected one of {', '.join(PUBLIC_DATA)}")
    if given.data is not None:
        raise InputError(f"--lengths-of {name} and {given.data} both have lengths; expected one of them")
    _refuse(given, ("column", "ids", "groups"), " with --lengths-of")


def _check_page(given: argparse.Namespace) -> None:
    """Raises InputError if the page cannot be written, or would overwrite an input file."""
    page = given.html
    if page.is_dir():
        raise InputError(f"--html {page} is a folder; expected a file to write")
    if not page.parent.is_dir():
        raise InputError(f"--html {page}: folder {page.parent} does not exist; create it first")
    for read in (given.data, given.model, given.cost):
        if read is not None and page.exists() and Path(read).exists() and page.samefile(read):
            raise InputError(f"--html {page} would overwrite {read}, which is read; name another file")


def _refuse(given: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises InputError for the first of the options `names` that the command line has."""
    for name in names:
        if getattr(given, name) is not None:
            raise InputError(f"{option_of(name)} {getattr(given, name)} has no effect{why}")
