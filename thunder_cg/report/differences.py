"""What a change did: two reports of one function, from before the change and from after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from thunder_cg.report import html, opening, text, units
from thunder_cg.report.files import Printed

if TYPE_CHECKING:
    from thunder_cg.report.report import OpReport, Report, TraceReport

_ABSENT = "not there"
_NONE = "The reports do not differ, but in how often the function ran."


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs between two reports. None is about line numbers, which edits move."""

    where: str  # the title of the trace, "" for the function as a whole
    what: str
    before: str
    after: str
    better: bool | None = None  # whether more is captured, or less is copied or kept; None if that is not clear


@dataclass(frozen=True, slots=True, repr=False)
class Differences(Printed):
    """What differs between two reports. `print` it, leave it as a notebook cell's last line, or `save` it to a file."""

    before: str  # the headlines of the reports
    after: str
    changes: tuple[Change, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The text, without the headlines."""
        lines: list[str] = []
        for where, changes in groupby(self.changes, key=lambda change: change.where):
            lines += [f"{where}:"] if where else []
            indent = "  " if where else ""
            lines += [f"{indent}{change.what}: {change.before} -> {change.after}" for change in changes]
        return tuple(lines or [_NONE])

    _title = "CUDA graphs, before and after"

    def _text(self) -> str:
        return "\n".join([f"before: {self.before}", f"after:  {self.after}", *self.lines])

    def _repr_html_(self) -> str:
        return html.differences(self)


def between(before: Report, after: Report) -> Differences:
    """The traces are compared in pairs: those of one kind, such as backwards, in their order."""
    changes: list[Change] = []
    for kind in ("forward", "backward"):
        old, new = ([trace for trace in report.traces if trace.kind == kind] for report in (before, after))
        for first, second in zip(old, new):
            changes += _of_traces(first, second)
        for trace in old[len(new) :]:
            changes.append(Change("", text.title(trace), opening.headline([trace]), _ABSENT))
        for trace in new[len(old) :]:
            changes.append(Change("", text.title(trace), _ABSENT, opening.headline([trace])))
    inductor, breaks = (
        [{(part.operator, part.reason) for part in report.outside} for report in (before, after)],
        [{(part.source or str(part.line), part.reason) for part in report.breaks} for report in (before, after)],
    )
    changes += [*_came_and_went("", "{} in Inductor", *inductor), *_came_and_went("", "graph break in `{}`", *breaks)]
    old_headline, new_headline = (opening.opening(report).partition("\n")[0] for report in (before, after))
    return Differences(old_headline, new_headline, tuple(changes))


def _of_traces(before: TraceReport, after: TraceReport) -> Iterator[Change]:
    where = text.title(after)
    where = where if before.function == after.function else f"{before.function}, {where}"
    yield from _numbers(where, before, after)
    yield from _ops(where, before, after)
    fallbacks = ({(reason, "some") for reason in trace.fallbacks} for trace in (before, after))
    yield from _came_and_went(where, "calls without graphs, as {}", *fallbacks)
    failures = ({("", region.failure) for region in trace.regions if region.failure} for trace in (before, after))
    yield from _came_and_went(where, "failure of a region", *failures)


def _ops(where: str, before: TraceReport, after: TraceReport) -> Iterator[Change]:
    eager = [[op for op in trace.ops if op.verdict == "eager"] for trace in (before, after)]
    old, new = ({_key(op): op for op in ops} for ops in eager)
    counts = [Counter(map(_key, ops)) for ops in eager]
    captured = [{(op.name, op.source) for op in t.ops if op.verdict == "capture"} for t in (before, after)]
    for key, count in (counts[0] - counts[1]).items():
        is_captured = old[key].name, old[key].source
        became = "captured" if is_captured in captured[1] else _ABSENT
        yield Change(where, _shown(old[key], count), f"eager: {old[key].reason}", became, became == "captured" or None)
    for key, count in (counts[1] - counts[0]).items():
        op = new[key]
        why = f"eager: {op.reason}: {op.detail}" + (f"; {op.fix}" if op.fix else "")
        was = "captured" if (op.name, op.source) in captured[0] else _ABSENT
        yield Change(where, _shown(op, count), was, why, False)


def _came_and_went(
    where: str, what: str, before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]
) -> Iterator[Change]:
    """Of what is bad where it is there. Each has a name, for ``what``, and says more."""
    before, after = set(before), set(after)
    for name, said in sorted(before - after):
        yield Change(where, what.format(name), said, "none", True)
    for name, said in sorted(after - before):
        yield Change(where, what.format(name), "none", said, False)


def _numbers(where: str, before: TraceReport, after: TraceReport) -> Iterator[Change]:
    old, new = (_measured(trace) for trace in (before, after))
    for name in old:
        shown = units.size if name.startswith("bytes") else str
        if shown(old[name]) != shown(new[name]):
            # More regions may hold more ops, or be what is left of a larger one; fewer ops may be fusions.
            better = None if name in ("regions", "captured ops") else new[name] < old[name]
            yield Change(where, name.removeprefix("bytes "), shown(old[name]), shown(new[name]), better)


def _measured(trace: TraceReport) -> dict[str, int]:
    return {
        "regions": len(trace.regions),
        "captured ops": trace.counts["capture"],
        "eager ops": trace.counts["eager"],
        "bytes copied in per replay": sum(region.bytes_in for region in trace.regions),
        "bytes copied out per replay": sum(region.bytes_out for region in trace.regions),
        "bytes in memory pools": 0 if trace.kind == "backward" else trace.arena_bytes,  # it has those of its forward
    }


def _key(op: OpReport) -> tuple[str | None, ...]:
    return op.name, op.source, op.reason


def _shown(op: OpReport, count: int) -> str:
    times = f" x{count}" if count > 1 else ""
    is_known = op.source is not None and not str(op.line).startswith("near ")
    return f"{op.name}{times}" + (f" in `{op.source}`" if is_known else "")
