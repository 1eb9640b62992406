"""Formats the answer as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from . import figures
from .advice import NOT_PREDICTED, Advice, Recommendation
from .prediction import Case

WIDTH = 110
VERSION = 3  # JSON format: within a version, entries may be added, but none changes its meaning


def json_report(advice: Advice) -> str:
    """Returns a JSON object. Seconds, bytes, and ratios are plain numbers, or null if unknown."""
    samples, cost = advice.request.samples, advice.request.cost
    report = {
        "version": VERSION,
        "data": {
            "source": samples.source,
            "samples": len(samples.items),
            "tokens": samples.token_rule,
            "length": samples.summary,
        },
        "model": cost.model.description,
        "load_unit": cost.unit,
        "assumptions": advice.assumptions,
        "cases": [
            _json_case(case, recommendation, advice.request.gin_settings)
            for case, recommendation in advice.cases
        ],
    }
    return json.dumps(report, indent=1, ensure_ascii=False)


def _json_case(
    case: Case, recommendation: Recommendation, gin_settings: Mapping[str, object] | None
) -> dict[str, Any]:
    entries = asdict(case)
    del entries["outcomes"]
    entries["strategies"] = []
    for outcome in case.outcomes.values():
        strategy = outcome.strategy
        outcome_figures = asdict(outcome)
        del outcome_figures["strategy"], outcome_figures["loads"]
        lines = [] if gin_settings is None else strategy.gin_lines(gin_settings)
        name = {"name": strategy.name}
        entries["strategies"].append(name | outcome_figures | {"gin": lines, "python": strategy.python})
    entries["recommendation"] = asdict(recommendation)
    return entries


def text_report(advice: Advice) -> str:
    """Returns the answer in lines of at most about `WIDTH` characters. The page shows more figures."""
    samples, cost, gin_settings = advice.request.samples, advice.request.cost, advice.request.gin_settings
    meanings = figures.meanings((case for case, _ in advice.cases), figures.IN_TEXT)
    columns = ". ".join(f"{title}: {meaning}" for title, meaning in meanings.items())
    origin = [] if samples.origin is None else [samples.origin]
    blocks = [
        f"Data    {samples.source}: {figures.summary(samples)}\n"
        f"Model   {cost.model.description}; tokens = {samples.token_rule}; loads in {cost.unit}",
        *(_text_case(*each, gin_settings is not None) for each in advice.cases),
        "\n".join(_wrapped(line + ".", "") for line in (*origin, columns, NOT_PREDICTED)),
    ]
    return "\n\n".join(blocks)


def _text_case(case: Case, recommendation: Recommendation, is_in_gin: bool) -> str:
    title = f"{figures.case_title(case)}, {figures.drawn(case)}"
    lines = [title, "=" * len(title), _aligned(figures.table(case, figures.IN_TEXT))]
    lines += [_wrapped("→ " + recommendation.headline, "")]
    if recommendation.strategy is not None:
        if is_in_gin:
            lines += [f"    {line}" for line in recommendation.gin or ["The gin file has its settings."]]
        lines += [f"    In your own program: {recommendation.python}"]
    lines += [_wrapped(note) for note in (*recommendation.notes, *figures.about_padding(case))]
    return "\n".join(lines)


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    """Returns the table as text, with the first column aligned left and the others aligned right."""
    first, *others = columns
    padded = [[cell.ljust(max(map(len, first))) for cell in first]]
    padded += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    return "\n".join("  ".join(row) for row in zip(*padded, strict=True))


def _wrapped(text: str, bullet: str = "- ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))
