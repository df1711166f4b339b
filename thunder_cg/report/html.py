"""The report as HTML: a fragment for a notebook, and a page that needs nothing else.

It opens with the lines of the text report. Then come the steps of each trace in their order: a region is a line that
unfolds to its ops, and eager ops stand in between, each beside its source. All tables have the same columns.

A notebook may drop the style sheet. Columns and the colours of verdicts are inline, so that they stay. The colours are
translucent and the text keeps the page's colour, so that light and dark pages both read well. Nothing is loaded, and
there is no script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from thunder_cg.report import opening, picture, text, units

if TYPE_CHECKING:
    from thunder_cg.report.differences import Change, Differences
    from thunder_cg.report.report import OpReport, RegionReport, Report, TraceReport

MARK = "<!DOCTYPE html><!-- thunder_cg report -->"  # pages begin with it
_COLOURS = {"capture": picture.CAPTURED, "eager": picture.EAGER, "bookkeeping": picture.OTHER}
_COLUMNS = {"source": 28, "op": 20, "why": 30, "what would change it": 22}  # and their widths in percent
_CHANGES = {"what": 35, "before": 24, "after": 34, "": 7}
_OUTCOMES = {True: "capture", False: "eager", None: "bookkeeping"}  # by whether a change is for the better
_WORDS = {True: "better", False: "worse", None: ""}
_WIDE, _LEFT = "table-layout: fixed; width: 100%", "text-align: left; vertical-align: top"
_STYLE = """
.thunder-cg { line-height: 1.4; overflow-wrap: anywhere; }
.thunder-cg > p { font-size: 1.2em; margin: 0.5em 0; }
.thunder-cg details { margin: 0.25em 0; }
.thunder-cg > details { margin-top: 1.5em; }
.thunder-cg summary { cursor: pointer; padding: 0.2em 0.4em; }
.thunder-cg details details { border-left: 3px solid rgba(128, 128, 128, 0.4); }
.thunder-cg table { border-collapse: collapse; margin: 0; font-size: 0.9em; }
.thunder-cg th, .thunder-cg td { text-align: left; vertical-align: top; white-space: normal;
  padding: 0.25em 0.5em; border: 0; border-top: 1px solid rgba(128, 128, 128, 0.25); }
.thunder-cg .plan { overflow-x: auto; }
@media (max-width: 45em) {
  .thunder-cg thead, .thunder-cg col { display: none; }
  .thunder-cg table, .thunder-cg tbody, .thunder-cg tr, .thunder-cg td { display: block; }
  .thunder-cg td { border: 0; padding: 0.1em 0.5em; }
  .thunder-cg td:empty { display: none; }
  .thunder-cg tr { border-top: 1px solid rgba(128, 128, 128, 0.4); padding: 0.2em 0; }
  .thunder-cg td:last-child:not([colspan])::before { content: "to change it: "; }
  .thunder-cg .changes td:last-child::before { content: none; }
  .thunder-cg .changes td:nth-child(2)::before { content: "before: "; }
  .thunder-cg .changes td:nth-child(3)::before { content: "after: "; }
}
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; max-width: 100em; margin: 0 auto; padding: 1em;
  background: #fff; color: #1f2328; }
@media (prefers-color-scheme: dark) { body { background: #14171c; color: #e3e6ea; } }
"""


def render(report: Report) -> str:
    """A fragment; safe to place in any page, all text in it is escaped."""
    first, *rest = opening.opening(report).splitlines()
    traces = "".join(_traces(report.traces))
    above = f"<p><b>{escape(first)}</b></p>{_indented(rest)}"
    return f'<div class="thunder-cg"><style>{_STYLE}</style>{above}{traces}{_pre(text.memory(report.memory))}</div>'


def _indented(said: Iterable[str]) -> str:
    """The lines with their indents, on pages of any width."""
    indents = ((len(line) - len(line.lstrip()), line) for line in said)
    return "".join(f'<div style="margin-left: min({n}ch, 25%)">{escape(line.strip())}</div>' for n, line in indents)


def differences(found: Differences) -> str:
    """A fragment: the headlines, then a table for each trace that differs, what is better in green, what is worse in
    red."""
    headlines = f"<p><b>Before: {escape(found.before)}</b></p><p><b>After: {escape(found.after)}</b></p>"
    tables = [
        f'<details open class="changes"><summary><b>{escape(where or "The whole function")}</b></summary>'
        f"{_changes(group)}</details>"
        for where, group in groupby(found.changes, key=lambda change: change.where)
    ]
    said = "" if tables else f"<div>{escape(found.lines[0])}</div>"
    return f'<div class="thunder-cg"><style>{_STYLE}</style>{headlines}{said}{"".join(tables)}</div>'


def _changes(changes: Iterable[Change]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _CHANGES)
    rows = "".join(
        f"{_start(_OUTCOMES[each.better])}<td>{escape(each.what)}</td><td>{escape(each.before)}</td>"
        f"<td>{escape(each.after)}</td><td>{_WORDS[each.better]}</td></tr>"
        for each in changes
    )
    return _table(f'<thead><tr style="{_LEFT}">{head}</tr></thead><tbody>{rows}</tbody>', _CHANGES)


def page(content: str, title: str, generator: str = "thunder_cg") -> str:
    """A whole page around a fragment; its head says what made it."""
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    view += f'<meta name="generator" content="{escape(generator)}">'
    head = f'<head><meta charset="utf-8">{view}<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head>'
    return f'{MARK}<html lang="en">{head}<body>{content}</body></html>\n'


def lines(said: Iterable[str]) -> str:
    """A fragment: the first line as a headline, and the others as they are."""
    first, *rest = said
    return f'<div class="thunder-cg"><style>{_STYLE}</style><p><b>{escape(first)}</b></p>{_indented(rest)}</div>'


def _pre(said: Iterable[str]) -> str:
    content = escape("\n".join(said))
    return f'<pre style="white-space: pre-wrap">{content}</pre>' if content else ""


def _traces(traces: Sequence[TraceReport]) -> Iterator[str]:
    """Each trace, and below it, folded, those with the same ops."""
    trained = {(trace.function, trace.entry) for trace in traces if trace.kind == "backward"}
    for first, *others in text.folded(traces):
        yield _trace(first, is_open=True, saves=(first.function, first.entry) in trained)
        said = "".join(_trace(each, is_open=False, saves=(each.function, each.entry) in trained) for each in others)
        yield f"<details><summary>and {len(others):,} more with the same ops</summary>{said}</details>" * bool(others)


def _trace(trace: TraceReport, *, is_open: bool, saves: bool) -> str:
    summary = f"<b>{escape(text.title(trace))}</b>: {escape(opening.headline([trace]))}"
    made_for = [text.entry(trace)] if trace.kind == "forward" else []
    said = "<br>".join(map(escape, (*made_for, text.calls(trace), *text.collectives(trace))))
    drawn = picture.render(trace, saves=saves)
    plan = f'<details><summary>Picture of the plan</summary><div class="plan">{drawn}</div></details>' if drawn else ""
    start = "<details open>" if is_open else "<details>"
    return f"{start}<summary>{summary}</summary><p>{said}</p>{plan}{''.join(_steps(trace))}</details>"


def _steps(trace: TraceReport) -> Iterator[str]:
    """The columns' names, then the regions, and each run of ops between two."""
    regions = {region.name: region for region in trace.regions}
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    yield _table(f'<thead><tr style="{_LEFT}">{head}</tr></thead>')
    for name, group in groupby(trace.ops, key=lambda op: op.region):
        table = _table(f"<tbody>{''.join(_rows(group))}</tbody>")
        yield table if name is None else _region(regions[name], table)


def _region(region: RegionReport, table: str) -> str:
    ops = units.count(region.ops, "op")
    said = f"<b>{escape(region.name)}</b> on {escape(region.device)}, {ops}: {escape(text.region_counts(region))}"
    notes = "".join(f"<br>{escape(note)}" for note in text.notes(region))
    style = f"background-color: {picture.colour_of(region)}"
    return f'<details><summary style="{style}">{said}{notes}</summary>{table}</details>'


def _table(content: str, widths: Mapping[str, int] = _COLUMNS) -> str:
    columns = "".join(f'<col style="width: {width}%">' for width in widths.values())
    return f'<table style="{_WIDE}"><colgroup>{columns}</colgroup>{content}</table>'


def _rows(ops: Iterable[OpReport]) -> Iterator[str]:
    """Ops of one line of source stand together, beside it. Bookkeeping is one row wherever it appears."""
    for (verdict, line, source), group in groupby(ops, key=lambda op: (op.verdict, op.line, op.source)):
        mine = list(group)
        if verdict == "bookkeeping":
            yield f'{_start(verdict)}<td colspan="{len(_COLUMNS)}">bookkeeping: {_names(mine)}</td></tr>'
            continue
        where = "<br>".join(filter(None, (source and f"<code>{escape(source)}</code>", line and escape(line))))
        span = f' rowspan="{len(mine)}"' if len(mine) > 1 else ""
        beside = f"<td{span}>{where}</td>"
        for op in mine:
            name = f"<code>{escape(op.name)}</code>" + (f" ({escape(', '.join(op.fused))})" if op.fused else "")
            why = ("<b>eager</b>, " if verdict == "eager" else "") + escape(f"{op.reason}: {op.detail}".strip(": "))
            yield f"{_start(verdict)}{beside}<td>{name}</td><td>{why}</td><td>{escape(op.fix)}</td></tr>"
            beside = ""


def _start(verdict: str) -> str:
    return f'<tr style="background-color: {_COLOURS[verdict]}; {_LEFT}">'


def _names(ops: Iterable[OpReport]) -> str:
    """One row for many: a model has an unpack for each of its parameters, and none of them is work."""
    counted = Counter(op.name for op in ops)
    return ", ".join(f"<code>{escape(name)}</code>" + (f" x{n}" if n > 1 else "") for name, n in counted.items())
