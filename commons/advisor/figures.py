"""The figures of a case as a table, for the terminal and the page."""

from __future__ import annotations

from commons.advisor.prediction import Case, Outcome

HEADER = (
    "strategy",
    "imbalance",
    "speedup",
    "step",
    "not hidden",
    "sent/rank",
    "exchange",
    "moved",
    "tokens",
    "planning",
)
MEANING = {
    "imbalance": "largest ÷ mean load of a step, mean ± standard deviation over the drawn steps",
    "speedup": "time as loaded ÷ time so, ± standard error; the exchange runs beside the step before",
    "step": "predicted time of a step; – where neither --tflops nor --cost is given",
    "not hidden": "the speedup if nothing of the exchange hides behind the step",
    "sent/rank": "by all-to-all, mean over ranks and steps",
    "exchange": "of the rank that sends or receives most, at the given bandwidth",
    "moved": "share of the samples that leave the rank that loaded them",
    "tokens": "of the rank with most ÷ the mean of all, mean over steps: activations follow it",
    "planning": "of a step, or of a whole window, measured on this machine; a thread does it a step ahead, "
    "so that it costs nothing where it is shorter than a step",
}


def rows(case: Case) -> list[tuple[str, ...]]:
    """A row for each strategy, as `HEADER` says."""
    return [_row(case, outcome) for outcome in case.outcomes]


def size(num_bytes: float) -> str:
    """Bytes, in a unit that leaves three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5 or unit == "GB":
            break
        num_bytes /= 1e3
    return f"{num_bytes:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds, in a unit that leaves three digits."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def with_error(value: float, error: float | None, digits: int) -> str:
    """Both with so many digits; the value alone where there is no error."""
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    moves = outcome.samples_moved > 0
    tokens = outcome.largest_tokens / case.mean_tokens if case.mean_tokens else 1.0
    is_baseline = outcome is case.outcomes[0]
    return (
        outcome.strategy.title,
        with_error(outcome.imbalance.mean, outcome.imbalance.std, 3),
        "1" if is_baseline else with_error(outcome.speedup, outcome.speedup_error, 2),
        "–" if outcome.step_seconds is None else duration(outcome.step_seconds),
        "–" if outcome.exposed_speedup is None or is_baseline else f"{outcome.exposed_speedup:.2f}",
        size(outcome.bytes_sent) if moves else "–",
        duration(outcome.exchange_seconds) if moves else "–",
        f"{outcome.samples_moved:.0%}" if moves else "–",
        f"{tokens:.2f} ×",
        "–" if is_baseline else duration(outcome.planning_seconds),
    )
