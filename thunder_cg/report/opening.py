"""The lines that every form of the report opens with: what ran, what is not in a graph and why, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from thunder_cg.analysis.rules import FIXED_SIZE
from thunder_cg.report import lines
from thunder_cg.report.units import count

if TYPE_CHECKING:
    from thunder_cg.report.entries import ShapesReport
    from thunder_cg.report.report import RegionReport, Report, TraceReport

NOTHING_COMPILED = "Nothing is compiled yet: Thunder compiles at the first call. Call the function, then explain again."
_TO_PYTHON = (
    "for a branch on what a tensor holds, or for `.tolist()`, use thunder_cg.thunderfx, which leaves it to Python"
)
_TO_FIXED_SIZE = f"for a result whose size depends on what a tensor holds, {FIXED_SIZE}"
_TO_EXECUTOR = (
    "for an operator of torch.library, use thunder_cg.thunderfx, which keeps it, or register it with an executor of "
    "Thunder's (README, Your own operator)"
)
_TO_GRADIENT = "for an operator of torch.library, give it a gradient with torch.library.register_autograd"
# What to try, by what an error of Thunder's then has in it.
_TO_TRY = (
    (_TO_PYTHON, ("data dependen", "tolist")),
    (_TO_FIXED_SIZE, ("boolean advanced indexing", "DynamicOutputShape")),
    (_TO_GRADIENT, ("no autograd formula",)),
    (_TO_EXECUTOR, ("_ops", "not registered", "not yet supported")),
)


def opening(report: Report) -> str:
    """The lines that every form of the report opens with: what ran, what is eager, and why."""
    return "\n".join(_summary(report)) if report.traces or report.outside else nothing(report)


def _summary(report: Report) -> Iterator[str]:
    first, *rest = ran(report)
    yield f"CUDA graphs: {first}; {headline(report.traces)}"
    yield from rest
    yield from failures(report)
    yield from lines.by_line(report)
    yield from unmatched(report)
    yield from measured(report)
    yield from deselected(report)
    yield from shapes(report.shapes)


def nothing(report: Report) -> str:
    """What to say of a function of which nothing is compiled."""
    if not report.compile_failures:
        return NOTHING_COMPILED
    return f"Nothing is compiled. {' '.join(failures(report))}"


def failures(report: Report) -> Iterator[str]:
    """In how many calls Thunder could not compile the function, where, and what to try."""
    if report.compile_failures:
        said = f"Thunder raised while it compiled, in {report.compile_failures:,} of {count(report.calls, 'call')}"
        problem = report.compile_failure
        yield f"{said}: {problem}." if problem else f"{said}; its error says where."
        if tried := [hint for hint, signs in _TO_TRY if problem is None or any(sign in problem for sign in signs)]:
            yield f"To try: {'; '.join(tried)}."


def ran(report: Report) -> Iterator[str]:
    """How many calls replayed, and why the others did not; how often it was called if there is nothing to replay."""
    having = [trace for trace in report.traces if trace.regions]
    if not having:
        yield f"none, in {count(report.calls, 'call')}" if report.calls else "none"
        return
    said = []
    graphs = len({trace.function for trace in having})
    for kind, noun in (("forward", "call"), ("backward", "backward")):
        of_kind = [trace for trace in having if trace.kind == kind]
        calls = sum(trace.calls for trace in of_kind)
        if calls:
            of = f" of {graphs} graphs" if graphs > 1 and kind == "forward" else ""
            said.append(f"{sum(trace.replays for trace in of_kind):,} of {count(calls, noun)}{of}")
    yield f"{' and '.join(said)} replayed" if said else "no call yet"
    if said and (why := [*_not_replayed(having)]):
        yield f"Not replayed: {'; '.join(why)}"
    if is_complete(report, having):
        yield "All calls after warm-up and capture replay, and no operator is eager: there is nothing to change."
    for reason, fix in {reason: fix for trace in having for reason, fix in trace.fixes.items()}.items():
        yield f"To change that {reason.partition(' (')[0].partition(',')[0]}: {fix}"


def is_complete(report: Report, having: Sequence[TraceReport]) -> bool:
    """Whether nothing can be better: all operators are in graphs, and all calls that may replay do."""
    eager = sum(trace.counts["eager"] for trace in report.traces)
    others = report.outside or report.breaks or report.compile_failures or any(trace.fallbacks for trace in having)
    return not (eager or others) and all(trace.replays and not trace.awaiting_capture for trace in having)


def _not_replayed(traces: Sequence[TraceReport]) -> Iterator[str]:
    for number, noun in ((sum(t.warm_ups for t in traces), "warm-up"), (sum(t.captures for t in traces), "capture")):
        if number:
            yield count(number, noun)
    reasons = sum((Counter(trace.fallbacks) for trace in traces), Counter[str]())
    yield from (f"{times:,} x {reason}" for reason, times in reasons.most_common())
    if waiting := [trace for trace in traces if trace.awaiting_capture]:
        versions = [*dict.fromkeys(f"{trace.function}, compiled version {trace.entry}," for trace in waiting)]
        of = f" of {versions[0]}" if len(versions) == 1 else f" of {len(versions)} compiled versions"
        of = of if len(waiting) < len(traces) else ""
        yield f"the next call{of} with inputs of the same shapes and strides will capture"


def headline(traces: Sequence[TraceReport]) -> str:
    """How many regions hold how many of the ops, and how many ops stay eager."""
    counts = sum((trace.counts for trace in traces), Counter[str]())
    regions = sum(len(trace.regions) for trace in traces)
    work = counts["capture"] + counts["eager"]
    held = f"{count(regions, 'region')} with {counts['capture']} of {count(work, 'op')}"
    return f"{held}; {count(counts['eager'], 'op')} eager"


def unmatched(report: Report) -> Iterator[str]:
    """Names in options that no operator has."""
    for option, name, instead in report.unmatched:
        hint = f"; {instead}" if instead else ""
        yield f"{option}= names {name}, and no operator of these traces has that name{hint}"


def measured(report: Report) -> Iterator[str]:
    """How times were measured, what regions save in a call, and which of them do not pay."""
    if report.clock is None:
        return
    regions = [region for trace in report.traces for region in trace.regions if region.pays is not None]
    as_graphs, eagerly = sum(_graph(region) for region in regions), sum(_eager(region) for region in regions)
    how = "CUDA events" if report.clock == "cuda" else "the host's clock"
    yield f"Measured with {how}: the regions take {as_graphs:,.0f} µs of a call as graphs, {eagerly:,.0f} µs eagerly."
    if report.clock == "tape":
        yield "The tape stands in for CUDA graphs and is slower than what it replays, so no region pays here."
    elif losing := [region for region in regions if not region.pays]:
        names = ", ".join(f"{r.name} ({_graph(r):,.0f} µs as a graph, {_eager(r):,.0f} µs eagerly)" for r in losing)
        larger = "Larger ones pay more: remove what splits them, or leave their operators eager with deny="
        yield f"Regions that do not pay: {names}. {larger}."


def deselected(report: Report) -> Iterator[str]:
    """The regions that ``select="measured"`` leaves eager, with both times, and what to do."""
    regions = [region for trace in report.traces for region in trace.regions if region.deselected]
    if regions:
        said = [(region.name, *str(region.failure).partition("; ")) for region in regions]
        names = ", ".join(f"{name} ({times})" for name, times, *_ in said)
        yield f'select="measured" leaves eager what does not pay: {names}. To change that: {said[0][-1]}.'


def _graph(region: RegionReport) -> float:
    return region.microseconds or 0.0


def _eager(region: RegionReport) -> float:
    return region.eager_microseconds or 0.0


def shapes(parts: Sequence[ShapesReport]) -> Iterator[str]:
    """Of each function that was compiled for several shapes: which inputs, how often, and what to do."""
    for part in parts:
        cost = f"each new shape compiles anew in Thunder ({part.seconds:.2f} s), warms up and captures"
        fix = "pad to a few sizes, and mask the padding in the loss; if only the last batch differs, drop_last=True"
        yield f"{part.function}: {part.shapes:,} shapes of {' and '.join(part.names)} so far; {cost}; {fix}"
