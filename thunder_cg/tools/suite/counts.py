"""Counts what was captured of a step, from two reports of `explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from thunder_cg.report.breaks import GraphBreak
from thunder_cg.report.report import Report, TraceReport
from thunder_cg.tools.suite.results import BREAK, EAGER, INDUCTOR, NOT_REPLAYED, NotCaptured, SuiteRow


def fill_counts(row: SuiteRow, reports: Sequence[Report]) -> None:
    """Counts the ops and regions that ran between the two reports. Other traces served earlier steps only."""
    before, after = reports
    earlier = {_key(trace): trace for trace in before.traces}
    # The calls of a trace without regions are not counted, so that it always counts as one that ran.
    ran = [t for t in after.traces if not t.regions or t.calls > getattr(earlier.get(_key(t)), "calls", 0)]
    if not ran:
        raise RuntimeError("Thunder compiled nothing of the model, or nothing of it ran in the last step")
    left: Counter[tuple[str, str]] = Counter()
    for part in after.outside:
        left[part.operator, part.reason] += part.count
    row.captured = sum(trace.counts["capture"] for trace in ran)
    row.ops = row.captured + sum(trace.counts["eager"] for trace in ran) + left.total()
    row.graphs = len({trace.function for trace in ran})
    row.regions = sum(len(trace.regions) for trace in ran)
    idle = [why for trace in ran for why in _not_replayed(earlier.get(_key(trace)), trace)]
    row.replayed = row.regions - len(idle)
    eager = Counter((op.name, op.reason) for trace in ran for op in trace.ops if op.verdict == "eager")
    breaks = Counter(map(_break, after.breaks))
    row.outside = [
        *(NotCaptured(EAGER, name, count, why) for (name, why), count in eager.items()),
        *(NotCaptured(INDUCTOR, what, count, why) for (what, why), count in left.items()),
        *(NotCaptured(BREAK, where, count, why) for (where, why), count in breaks.items()),
        *(NotCaptured(NOT_REPLAYED, "region", count, why) for why, count in Counter(idle).items()),
    ]


def _break(each: GraphBreak) -> tuple[str, str]:
    """Where Dynamo could not go on, and why, without what calls that and what it means for these."""
    where = (each.line or "no line").partition(", called from")[0]
    return f"{each.source or 'a call'} ({where})", each.reason.partition(",")[0]


def _key(trace: TraceReport) -> tuple[str, int, str]:
    return trace.function, trace.entry, trace.kind


def _not_replayed(before: TraceReport | None, after: TraceReport) -> Iterator[str]:
    """The reason for each region that did not replay since the earlier report."""
    earlier = {region.name: region.replays for region in before.regions} if before else {}
    for region in after.regions:
        if region.replays <= earlier.get(region.name, 0):
            why = "; ".join(after.fallbacks) or "its trace ran without graphs"
            yield region.failure or why
