"""The report as one HTML table per trace, each op coloured by its verdict, grouped by region.

Styles are inline: a notebook that was run elsewhere drops style sheets but keeps inline colours. Backgrounds are
translucent and the text keeps the page's colour, so that light and dark pages both read well. Nothing is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from thunder_cg.report import text

if TYPE_CHECKING:
    from thunder_cg.report.report import OpReport, RegionReport, Report, TraceReport

_COLOURS = {
    "capture": "rgba(46, 160, 67, 0.22)",
    "eager": "rgba(248, 81, 73, 0.25)",
    "bookkeeping": "rgba(128, 128, 128, 0.10)",
}
_COLUMNS = ("op", "verdict", "reason", "why", "what would change it", "source")
_LEFT = "text-align: left; vertical-align: top"
_HEADER = f"{_LEFT}; background-color: rgba(128, 128, 128, 0.25)"


def render(report: Report) -> str:
    """The whole report; safe to place in any page, all text in it is escaped."""
    if not report.traces and not report.outside:
        return f"<div><p>{escape(text.nothing(report))}</p></div>"
    first, *rest = text.ran(report)
    said = "".join(f"<br>{escape(line)}" for line in rest)
    headline = f"<p><b>CUDA graphs: {escape(first)}; {escape(text.headline(report.traces))}</b>{said}</p>"
    lines = (*text.failures(report), *text.unmatched(report), *text.measured(report), *text.shapes(report.shapes))
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    said += _listed(text.CAUSES, text.causes(report.causes))
    said += _listed(text.BREAKS, text.breaks(report.breaks)) + _listed(text.OUTSIDE, text.outside(report.outside))
    return f"<div>{headline}{said}{''.join(map(_trace, report.traces))}</div>"


def _listed(title: str, lines: Iterable[str]) -> str:
    """Lines of text under their title; nothing if there are none."""
    said = escape("\n".join(lines))
    return f"<p>{escape(title)}</p><pre>{said}</pre>" if said else ""


def _trace(trace: TraceReport) -> str:
    summary = f"<b>{escape(text.title(trace))}</b>: {escape(text.headline([trace]))}"
    head = "".join(f'<th style="{_HEADER}">{escape(name)}</th>' for name in _COLUMNS)
    table = f"<table><thead><tr>{head}</tr></thead>{''.join(_groups(trace))}</table>"
    made_for = [text.entry(trace)] if trace.kind == "forward" else []
    said = "<br>".join(map(escape, (*made_for, text.calls(trace), *text.collectives(trace))))
    return (
        f"<details open><summary>{summary}</summary><p>{said}</p>"
        f'<div style="max-height: 45em; overflow: auto">{table}</div></details>'
    )


def _groups(trace: TraceReport) -> Iterator[str]:
    """A `tbody` for every region and every run of ops between two; the trace's frame is one row wherever it appears."""
    regions = {region.name: region for region in trace.regions}
    for (name, verdict), group in groupby(trace.ops, key=lambda op: (op.region, op.verdict)):
        heading = "" if name is None else _region(regions[name])
        ops = list(group)
        rows = _frame(ops) if verdict == "bookkeeping" else "".join(map(_row, ops))
        yield f"<tbody>{heading}{rows}</tbody>"


def _region(region: RegionReport) -> str:
    said = f"<b>{escape(region.name)}</b> on {escape(region.device)}, {escape(text.region_counts(region))}"
    said = "<br>".join([said, *map(escape, text.notes(region))])
    return f'<tr><th colspan="{len(_COLUMNS)}" style="{_HEADER}; font-weight: normal">{said}</th></tr>'


def _frame(ops: Iterable[OpReport]) -> str:
    """One row for many: a model has an unpack for each of its parameters, and none of them is work."""
    names = Counter(op.name for op in ops)
    said = ", ".join(f"{name} x{times}" if times > 1 else name for name, times in names.items())
    return _line("bookkeeping", (f"<code>{escape(said)}</code>", "bookkeeping", "", "", "", ""))


def _row(op: OpReport) -> str:
    name = f"<code>{escape(op.name)}</code>" + (f" ({escape(', '.join(op.fused))})" if op.fused else "")
    where = "<br>".join(filter(None, (op.source and f"<code>{escape(op.source)}</code>", op.line and escape(op.line))))
    verdict = op.verdict if op.microseconds is None else f"{op.verdict}, {op.microseconds:,.0f} µs a call"
    return _line(op.verdict, (name, *map(escape, (verdict, op.reason, op.detail, op.fix)), where))


def _line(verdict: str, cells: Sequence[str]) -> str:
    """A table row in the verdict's colour; its cells are HTML already."""
    columns = "".join(f'<td style="{_LEFT}">{cell}</td>' for cell in cells)
    return f'<tr style="background-color: {_COLOURS[verdict]}">{columns}</tr>'
