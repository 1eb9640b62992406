"""The command `balance-advisor`: predicts what was asked for, and prints or writes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from commons.advisor.advice import Advice, LengthSummary
from commons.advisor.drawn_steps import draw_steps
from commons.advisor.html_page import html_page
from commons.advisor.input_error import InputError
from commons.advisor.json_report import json_report
from commons.advisor.prediction import Case, predict, warm_up
from commons.advisor.recommendation import recommend
from commons.advisor.request import CHART_RANKS, Request, parse_request
from commons.advisor.strategies import strategies
from commons.advisor.text_report import text_report


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 if there is something wrong with what the user gave."""
    try:
        request = parse_request(argv)
        advice = advise(request)
        if request.html is not None:
            _write(request.html, html_page(advice))
        _print(json_report(advice) if request.as_json else text_report(advice))
    except InputError as error:
        print(f"balance-advisor: error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8", errors="replace")  # names of files may be of any bytes
    except OSError as error:
        raise InputError(f"--html {path}: {error}") from error


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except (OSError, UnicodeError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # at exit Python would try again
        if not isinstance(error, BrokenPipeError):  # whoever reads has seen enough, as `head` has
            raise InputError(f"stdout cannot be written to: {error}") from error


def advise(request: Request) -> Advice:
    """Predicts all that was asked for.

    Raises:
        InputError: there are fewer samples than a step needs, or one of them costs too much to count.
    """
    samples = request.samples
    workloads = request.cost.of(samples.tokens)
    sizes = request.bytes_per_item * samples.items
    ways = strategies(request.window, request.network.ranks_per_node, request.cost.file)
    asked = [(ranks, rows) for rows in request.rows_per_rank for ranks in request.ranks]
    shown = _shown_in_chart(request) if request.html is not None else []
    planned: dict[tuple[int, int], Case] = {}
    drawn = {
        key: draw_steps(workloads, samples.tokens, sizes, *key, multiple_of=request.window)
        for key in dict.fromkeys([*asked, *shown])
    }
    total = sum(len(ways) if steps.num_ranks > 1 else 1 for steps in drawn.values()) + 1
    with tqdm(total=total, desc="planning", file=sys.stderr, disable=None, leave=False) as progress:
        progress.set_postfix_str("the first time on a machine it compiles, for a minute")
        warm_up()
        progress.set_postfix_str("")
        progress.update()
        for key, steps in drawn.items():
            # A rank alone waits for none, whatever is switched on.
            of_case = ways if steps.num_ranks > 1 else ways[:1]
            planned[key] = predict(steps, request.cost, of_case, request.network, progress.update)
    return Advice(
        samples=samples,
        lengths=LengthSummary.of(samples.items),
        model=request.cost.description,
        assumptions=_assumptions(request),
        cases=[(planned[key], recommend(planned[key])) for key in asked],
        over_ranks=[planned[key] for key in shown],
    )


def _shown_in_chart(request: Request) -> list[tuple[int, int]]:
    rows = request.rows_per_rank[0]
    return [(ranks, rows) for ranks in CHART_RANKS if ranks * rows <= len(request.samples.items)]


def _assumptions(request: Request) -> list[str]:
    network = request.network
    nodes = (
        "all bytes that leave a rank count"
        if network.ranks_per_node is None
        else f"only bytes that leave a node of {network.ranks_per_node} ranks count"
    )
    return [
        request.cost.assumption,
        "Not predicted: gradients' all-reduce, embedding lookups and their communication, kernels that are "
        "slower on some lengths, and machines of different speed",
        f"The exchange moves {request.bytes_per_item} bytes per item at {network.bytes_per_second / 1e9:g} "
        f"GB/s per rank ({nodes}); in the pipelines native and prefetch it runs beside the step before, in "
        "none it does not",
        "Steps come from the samples in random order, one epoch without replacement after the other; "
        "incomplete last steps are left out",
    ]
