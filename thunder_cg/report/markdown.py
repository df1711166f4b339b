"""The report as Markdown, to paste into an issue: the opening lines, then tables of regions and of eager ops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from thunder_cg.report import opening, text

if TYPE_CHECKING:
    from thunder_cg.report.report import OpReport, Report, TraceReport

MARK = "<!-- thunder_cg report -->"  # files begin with it


def render(report: Report) -> str:
    """The content of a file."""
    parts = [part for trace, others in text.in_short(report.traces) for part in _trace(trace, others)]
    return lines(opening.opening(report).splitlines(), *parts, *_blocks(text.memory(report.memory)))


def lines(said: Iterable[str], *parts: str) -> str:
    """The content of a file: the first line as a headline, the others as they are, and the parts."""
    first, *rest = said
    return "\n\n".join((MARK, f"**{_escape(first)}**", *_blocks(rest), *parts)) + "\n"


def _trace(trace: TraceReport, others: Sequence[str]) -> Iterator[str]:
    yield f"### {_escape(text.title(trace))}"
    made_for = [text.entry(trace)] if trace.kind == "forward" else []
    yield "\n".join(f"- {_escape(line)}" for line in (opening.headline([trace]), *made_for, text.calls(trace)))
    if found := [*text.collectives(trace)]:
        yield "\n".join(f"- {_escape(line)}" for line in found)
    if trace.regions:
        rows = [
            (f"`{r.name}`", r.device, f"{r.ops:,}", *map(_escape, (text.region_counts(r), "; ".join(text.notes(r)))))
            for r in trace.regions
        ]
        yield table(("region", "device", "ops", "what it did", "notes"), rows)
    if eager := [op for op in trace.ops if op.verdict == "eager"]:
        yield table(("eager op", "source", "why", "what would change it"), [*map(_eager, eager)])
    if others:
        yield "\n".join(f"- {_escape(line)}" for line in others)


def _eager(op: OpReport) -> tuple[str, ...]:
    where = "<br>".join(filter(None, (op.source and _code(op.source), op.line and _escape(op.line))))
    return _code(op.name), where, _escape(": ".join(filter(None, (op.reason, op.detail)))), _escape(op.fix)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(said: str) -> str:
    """Code in a table. Only HTML's element can hold backticks and vertical bars."""
    return f"<code>{_escape(said)}</code>"


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """One block of text, or none if there are no lines."""
    if said := "\n".join(lines):
        fence = "```"
        while fence in said:
            fence += "`"
        yield f"{fence}text\n{said}\n{fence}"


def _escape(said: str) -> str:
    """As text: nothing in it is Markdown or HTML, and a table's cell stays one."""
    said = re.sub(r"[\\`*\[\]|~]|_(?!\w)|(?<!\w)_", lambda found: f"\\{found[0]}", said)
    return escape(said, quote=False).replace("\n", "<br>")
