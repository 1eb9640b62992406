"""The answer for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from commons.advisor import figures
from commons.advisor.advice import Advice, LengthSummary
from commons.advisor.prediction import Case, Outcome
from commons.advisor.recommendation import Recommendation
from commons.advisor.strategies import REFINED, WINDOW

WIDTH = 110


def text_report(advice: Advice) -> str:
    """Lines of at most about `WIDTH` characters, but for the tables."""
    blocks = [
        f"Data    {advice.samples.source}: {summary(advice.lengths)}\n"
        f"Model   {advice.model}; tokens = {advice.samples.token_rule}",
        *(_case(case, recommendation) for case, recommendation in advice.cases),
        "Columns\n" + "\n".join(_wrapped(f"{name}: {text}.") for name, text in _shown_columns(advice)),
        "Assumptions\n" + "\n".join(_wrapped(line + ".") for line in advice.assumptions),
    ]
    return "\n\n".join(blocks)


def _shown_columns(advice: Advice) -> list[tuple[str, str]]:
    """What the columns say that are in a table of some case."""
    titles = {column[0] for case, _ in advice.cases for column in _columns(case)}
    return [(name, text) for name, text in figures.MEANING.items() if name in titles]


def _columns(case: Case) -> list[tuple[str, ...]]:
    """Of the table, titles included; empty ones are left out."""
    columns = zip(figures.HEADER, *figures.rows(case), strict=True)
    return [column for column in columns if set(column[1:]) != {"–"}]


def summary(lengths: LengthSummary) -> str:
    """Lengths in a line."""
    return (
        f"{lengths.samples:,} samples, lengths {lengths.smallest:,} to {lengths.largest:,}, mean "
        f"{lengths.mean:,.0f}, median {lengths.median:,.0f}, 99% up to {lengths.percentile_99:,.0f}"
    )


def case_title(case: Case) -> str:
    """What was drawn."""
    epochs = "one epoch" if case.num_epochs == 1 else f"{case.num_epochs} epochs"
    ranks = "1 rank" if case.num_ranks == 1 else f"{case.num_ranks:,} ranks"
    return f"{ranks} × {case.rows_per_rank} rows: {case.num_steps} steps drawn, of {epochs}"


def below_table(case: Case) -> list[str]:
    """What is to be said of the figures."""
    lines = [
        f"A rank and step has {case.mean_tokens:,.0f} tokens and {figures.size(case.bytes_loaded)} on "
        "average. The lower bound of a step's imbalance is "
        f"{figures.with_error(case.lower_bound.mean, case.lower_bound.std, 3)}."
    ]
    if case.num_ranks > 1:
        received = figures.size(case.all_gather_bytes)
        lines.append(f"By an all-gather, each rank would receive {received} in a step.")
    ahead = case.outcome(REFINED)
    window = case.outcome(WINDOW)
    if ahead is not None:
        lines.append(
            f"On the host a rank holds {ahead.host_batches} batches "
            f"({figures.size(ahead.host_batches * case.bytes_loaded)}) where it held 1, as it plans ahead"
            + ("." if window is None else _of_the_window(case, window))
        )
    if window is not None:
        lines.append(
            "* changes what a step contains, and so training; its largest step has "
            f"{window.largest_step:.1f} × the work of its window's mean step. Off unless asked for."
        )
    return lines


def _of_the_window(case: Case, window: Outcome) -> str:
    held = figures.size(window.host_batches * case.bytes_loaded)
    return f", and {window.host_batches} ({held}) with the window."


def _case(case: Case, recommendation: Recommendation) -> str:
    title = case_title(case)
    lines = [title, "=" * len(title), _table(_columns(case))]
    lines += [_wrapped(line, "") for line in below_table(case)]
    lines += ["", _wrapped("→ " + recommendation.headline, "")]
    lines += [f"    {line}" for line in recommendation.gin_lines]
    lines += [_wrapped(note) for note in recommendation.notes]
    return "\n".join(lines)


def _table(columns: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for number in range(len(columns[0])):
        row = [column[number] for column in columns]
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(padded))
    return "\n".join(lines)


def _wrapped(text: str, bullet: str = "- ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))
