"""Formats a case as figures and sentences, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable

from .prediction import Case, Outcome
from .samples import SampleLengths
from .strategies import AS_LOADED, PIECES

_MEANINGS = {
    "imbalance": "largest ÷ mean load of a step",
    "speedup": "time as loaded ÷ time with the strategy, at most",
    "step": "predicted time; the exchange and planning overlap it, and it waits if they take longer",
    "not hidden": "speedup if the exchange overlaps nothing",
    "sent/rank": "bytes by all-to-all, mean over ranks and steps",
    "exchange": "time of the rank that sends or receives most, at the given bandwidth",
    "moved": "samples, or their pieces, that leave the rank that loaded them",
    "tokens": "of the fullest rank ÷ the mean; activation memory follows it",
    "planning": "time per step, measured on this machine",
}
# The page shows all columns, and the terminal shows the most important ones.
IN_TEXT = ("imbalance", "speedup", "step", "moved", "tokens", "planning")


def table(case: Case, titles: Iterable[str] = tuple(_MEANINGS)) -> list[list[str]]:
    """Returns the columns, each a title and a cell per strategy. Columns without a value are left out."""
    rows = [_cells(case, outcome) for outcome in case.outcomes.values()]
    columns = [["strategy", *(outcome.strategy.title for outcome in case.outcomes.values())]]
    for title in titles:
        cells = [row[title] for row in rows]
        if any(cell is not None for cell in cells):
            columns.append([title, *(cell or "–" for cell in cells)])
    return columns


def meanings(cases: Iterable[Case], titles: Iterable[str] = tuple(_MEANINGS)) -> dict[str, str]:
    """Returns the meaning of each column in the cases' tables, by title."""
    shown = {column[0] for case in cases for column in table(case, titles)}
    return {title: meaning for title, meaning in _MEANINGS.items() if title in shown}


def _cells(case: Case, outcome: Outcome) -> dict[str, str | None]:
    balances = outcome.strategy.name != AS_LOADED
    moves = outcome.share_of_samples_moved > 0
    mean_tokens = case.mean_tokens_per_rank
    not_hidden, step = outcome.speedup_exchange_not_hidden, outcome.step_seconds
    return {
        "imbalance": f"{outcome.imbalance:.3f}",
        "speedup": f"{outcome.speedup:.2f}" if balances else "1",
        "step": None if step is None else duration(step),
        "not hidden": f"{not_hidden:.2f}" if balances and not_hidden is not None else None,
        "sent/rank": size(outcome.bytes_sent_per_rank) if moves else None,
        "exchange": duration(outcome.exchange_seconds) if moves else None,
        "moved": f"{outcome.share_of_samples_moved:.0%}" if moves else None,
        "tokens": f"{outcome.largest_tokens_per_rank / mean_tokens if mean_tokens else 1:.2f}",
        "planning": duration(outcome.planning_seconds_measured) if balances else None,
    }


def case_title(case: Case) -> str:
    """Returns the title of a case, such as "8 ranks × 32 rows"."""
    return f"{case.ranks:,} rank{'s' * (case.ranks > 1)} × {case.rows_per_rank} rows"


def drawn(case: Case) -> str:
    """Returns the origin of the steps, such as "128 steps of one epoch"."""
    epochs = "one epoch" if case.epochs_drawn == 1 else f"{case.epochs_drawn} epochs"
    return f"{case.steps_drawn} steps of {epochs}"


def summary(samples: SampleLengths) -> str:
    """Returns one line of statistics about the lengths."""
    form = "lengths {min:,} to {max:,}, mean {mean:,.0f}, median {median:,.0f}, 99% up to {p99:,.0f}"
    return f"{len(samples.items):,} samples, {form.format(**samples.summary)}"


def about_padding(case: Case) -> list[str]:
    """Returns a sentence about models that pad, or nothing if their costs are unknown."""
    of = case.padded_model
    if of is None:
        return []
    return [
        "If your model pads a rank's rows to its longest row: largest cost ÷ mean cost without padding is "
        f"{of.as_loaded:.2f} as loaded, {of.rebalance:.2f} by rebalance, and {of.padded:.2f} by Padded(), at "
        f"most {of.speedup:.2f} × as fast as loaded."
    ]


def below_table(case: Case) -> list[str]:
    """Returns the sentences that follow the table."""
    lines = [
        f"Mean per rank and step: {case.mean_tokens_per_rank:,.0f} tokens, "
        f"{size(case.bytes_loaded_per_rank)}. The lower bound of a step's imbalance is "
        f"{case.lower_bound:.3f}."
    ]
    if case.ranks > 1:
        received = size(case.all_gather_bytes_per_rank)
        lines.append(f"By all-gather in place of all-to-all, each rank would receive {received} per step.")
    if PIECES in case.outcomes:
        lines.append(_about_pieces(case.outcomes[PIECES]))
    lines += about_padding(case)
    if case.ranks > 1:
        held = size(2 * case.bytes_loaded_per_rank)
        lines.append(f"Planning ahead holds 2 batches ({held}) per rank on the host instead of 1.")
    return lines


def _about_pieces(cut: Outcome) -> str:
    """Describes the cut samples, and the keys and values that their pieces fetch."""
    if not cut.samples_cut:
        return (
            "Pieces: no sample is cut, because whole samples come within 1% of the mean load or are too "
            "short. Rows follow the load."
        )
    line = (
        f"Pieces: {cut.samples_cut:.3g} samples per step are cut into {cut.pieces:.3g} pieces, and rows "
        f"follow the load. A rank fetches {size(cut.bytes_fetched_per_rank_and_layer)} of keys and values "
        "per layer. Over all layers, gradients included, this "
    )
    if cut.step_seconds is None:
        return f"{line}takes {duration(cut.fetch_seconds)} per step, which the speedup leaves out."
    return f"{line}adds {duration(cut.fetch_seconds)} to a step."


def size(num_bytes: float) -> str:
    """Formats a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5 or unit == "GB":
            break
        num_bytes /= 1e3
    return f"{num_bytes:.3g} {unit}"


def duration(seconds: float) -> str:
    """Formats a duration with three digits and a unit."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
