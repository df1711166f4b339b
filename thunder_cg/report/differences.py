"""What a change did: two reports of one function, from before the change and from after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thunder_cg.report import terminal, text, units

if TYPE_CHECKING:
    from thunder_cg.report.report import OpReport, Report, TraceReport


@dataclass(frozen=True, slots=True, repr=False)
class Differences:
    """What differs between two reports, a line each. None of them is about line numbers, which edits move."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return terminal.fit("\n".join(self.lines))

    __repr__ = __str__


def between(before: Report, after: Report) -> Differences:
    """The traces are compared in pairs: those of one kind, such as backwards, in their order."""
    lines: list[str] = []
    for kind in ("forward", "backward"):
        old, new = ([trace for trace in report.traces if trace.kind == kind] for report in (before, after))
        for first, second in zip(old, new):
            if found := [*_of_traces(first, second)]:
                name = first.function if first.function == second.function else f"{first.function}, {second.function}"
                lines += [f"{name}, {kind}, compiled version {second.entry}:", *(f"  {line}" for line in found)]
        lines += [f"gone: {text.title(trace)}: {text.headline([trace])}" for trace in old[len(new) :]]
        lines += [f"new: {text.title(trace)}: {text.headline([trace])}" for trace in new[len(old) :]]
    for word, ours, others in (("now in", before, after), ("not any more in", after, before)):
        known = Counter((part.operator, part.reason) for part in ours.outside)
        for part in others.outside:
            if not known[part.operator, part.reason]:
                lines.append(f"{word} Inductor's pieces: {part.operator}, {part.reason}")
    return Differences(tuple(lines or ["The reports do not differ, but in how often the function ran."]))


def _of_traces(before: TraceReport, after: TraceReport) -> Iterator[str]:
    yield from _numbers(before, after)
    eager = [[op for op in trace.ops if op.verdict == "eager"] for trace in (before, after)]
    old, new = ({_key(op): op for op in ops} for ops in eager)
    counts = [Counter(map(_key, ops)) for ops in eager]
    elsewhere = Counter(_name_and_source(op) for op in after.ops if op.verdict == "capture")
    for key, count in (counts[0] - counts[1]).items():
        became = "now captured" if elsewhere[_name_and_source(old[key])] else "not there any more"
        yield f"{_shown(old[key], count)} was eager: {became}"
    for key, count in (counts[1] - counts[0]).items():
        fix = f"; {new[key].fix}" if new[key].fix else ""
        yield f"{_shown(new[key], count)} is eager now: {new[key].reason}: {new[key].detail}{fix}"
    fallbacks = [Counter(trace.fallbacks) for trace in (before, after)]
    yield from (f"calls without graphs no more: {reason}" for reason in fallbacks[0] if not fallbacks[1][reason])
    yield from (f"calls without graphs now: {reason}" for reason in fallbacks[1] if not fallbacks[0][reason])
    failures = [{region.failure for region in trace.regions if region.failure} for trace in (before, after)]
    yield from (f"a region failed no more: {failure}" for failure in sorted(failures[0] - failures[1]))
    yield from (f"a region fails now: {failure}" for failure in sorted(failures[1] - failures[0]))


def _numbers(before: TraceReport, after: TraceReport) -> Iterator[str]:
    pairs = [(_measured(trace)) for trace in (before, after)]
    for name, old in pairs[0].items():
        new = pairs[1][name]
        if old != new:
            shown = units.size if name.startswith("bytes") else str
            yield f"{name.removeprefix('bytes ')}: {shown(old)} -> {shown(new)}"


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


def _name_and_source(op: OpReport) -> tuple[str | None, ...]:
    return op.name, op.source


def _shown(op: OpReport, count: int) -> str:
    times = f" x{count}" if count > 1 else ""
    is_known = op.source is not None and not str(op.line).startswith("near ")
    return f"{op.name}{times}" + (f" in `{op.source}`" if is_known else "")
