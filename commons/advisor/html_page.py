"""The answer as a page of its own: one file, without anything to load."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from commons.advisor import figures
from commons.advisor.advice import Advice
from commons.advisor.prediction import Case
from commons.advisor.recommendation import Recommendation
from commons.advisor.request import CHART_RANKS
from commons.advisor.strategies import AS_LOADED, REFINED
from commons.advisor.svg_charts import length_histogram, rank_loads, speedups
from commons.advisor.text_report import below_table, case_title, summary


def html_page(advice: Advice) -> str:
    """HTML that is also XML; it takes its colours from the reader's preference for light or dark."""
    style = files("commons.advisor").joinpath("page.css").read_text(encoding="utf-8")
    samples = advice.samples
    body = [
        "<header><h1>What balancing would gain</h1>",
        f"<p>{escape(samples.source)}: {escape(summary(advice.lengths))}.</p>",
        f"<p>{escape(advice.model)}; tokens = {escape(samples.token_rule)}.</p></header>",
        '<section class="cards">',
        *(_card(case, recommendation) for case, recommendation in advice.cases),
        "</section>",
        '<section class="charts">',
        _figure("How long the samples are", length_histogram(advice.lengths), ""),
        *([_speedup_figure(advice.over_ranks)] if advice.over_ranks else []),
        *(_load_figure(case, recommendation) for case, recommendation in advice.cases if case.num_ranks > 1),
        "</section>",
        *(_details(case, recommendation) for case, recommendation in advice.cases),
        *([_over_ranks(advice.over_ranks)] if advice.over_ranks else []),
        "<section><h2>What the columns say</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}.</dd>" for name, text in figures.MEANING.items()),
        "</dl></section>",
        "<section><h2>Assumptions</h2>",
        _list([line + "." for line in advice.assumptions]),
        "</section>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>What balancing would gain: {escape(samples.source)}</title><style>{style}</style></head>\n"
        "<body><main>" + "\n".join(body) + "</main></body></html>\n"
    )


def _card(case: Case, recommendation: Recommendation) -> str:
    outcome = case.outcome(recommendation.strategy or AS_LOADED)
    assert outcome is not None
    return (
        f'<article class="card"><p class="small">{escape(_ranks_and_rows(case))}</p>'
        f'<p class="big">{outcome.speedup:.2f} ×</p><p>{escape(recommendation.headline)}</p>'
        f"{_code(recommendation.gin_lines)}</article>"
    )


def _ranks_and_rows(case: Case) -> str:
    return case_title(case).partition(":")[0]


def _speedup_figure(cases: Sequence[Case]) -> str:
    names = [(outcome.strategy.name, outcome.strategy.title) for outcome in cases[0].outcomes[1:]]
    title = f"Speedup over ranks, {cases[0].rows_per_rank} rows on each"
    return _figure(title, speedups(cases), _legend(names))


def _load_figure(case: Case, recommendation: Recommendation) -> str:
    outcome = case.outcome(recommendation.strategy or REFINED)
    assert outcome is not None
    names = [(AS_LOADED, "as loaded"), (outcome.strategy.name, outcome.strategy.title)]
    title = f"Load ÷ mean load, {_ranks_and_rows(case)}, a typical step"
    return _figure(title, rank_loads(case, outcome.strategy.name), _legend(names))


def _figure(title: str, chart: str, legend: str) -> str:
    return f"<figure><figcaption>{escape(title)}{legend}</figcaption>{chart}</figure>"


def _legend(names: Sequence[tuple[str, str]]) -> str:
    entries = [f'<span><i class="key {name}"></i>{escape(title)}</span>' for name, title in names]
    return f'<span class="legend">{"".join(entries)}</span>'


def _details(case: Case, recommendation: Recommendation) -> str:
    parts = [
        f"<section><h2>{escape(_ranks_and_rows(case))}</h2>",
        f'<p class="small">{escape(case_title(case))}.</p>',
        _table(f"Figures of {_ranks_and_rows(case)}", [figures.HEADER, *figures.rows(case)]),
        *(f"<p>{escape(line)}</p>" for line in below_table(case)),
        _list(recommendation.notes) if recommendation.notes else "",
        "</section>",
    ]
    return "".join(parts)


def _over_ranks(cases: Sequence[Case]) -> str:
    """The chart's figures."""
    titles = [outcome.strategy.title for outcome in cases[0].outcomes[1:]]
    rows = [
        (f"{case.num_ranks:,}", *(f"{outcome.speedup:.2f}" for outcome in case.outcomes[1:]))
        for case in cases
    ]
    heading = f"Speedup over ranks, {cases[0].rows_per_rank} rows on each"
    table = _table(heading, [("ranks", *titles), *rows])
    last = cases[-1].num_ranks
    ends = (
        "" if last >= CHART_RANKS[-1] else f"<p>There are too few samples for a step of {2 * last} ranks.</p>"
    )
    return f"<section><h2>{escape(heading)}</h2>{table}{ends}</section>"


def _table(name: str, cells: Sequence[Sequence[str]]) -> str:
    """In a region that scrolls by itself where the page is narrow."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells[0])
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in cells[1:]
    )
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _code(lines: Sequence[str]) -> str:
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>" if lines else ""


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
