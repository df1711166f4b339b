"""The report as plain text: how much is captured, what stays eager and why, then what every region cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from thunder_cg.report import lines
from thunder_cg.report.units import count, size

if TYPE_CHECKING:
    from thunder_cg.report.collectives import CollectiveReport
    from thunder_cg.report.entries import InputReport, ShapesReport
    from thunder_cg.report.memory import MemoryReport
    from thunder_cg.report.report import RegionReport, Report, TraceReport

NOTHING_COMPILED = "Nothing is compiled yet: Thunder compiles at the first call. Call the function, then explain again."
_TO_PYTHON = (
    "for a branch on what a tensor holds, or for `.tolist()`, use thunder_cg.thunderfx, which leaves it to Python"
)
_TO_EXECUTOR = (
    "for an operator of torch.library, use thunder_cg.thunderfx, which keeps it, or register it with an executor of "
    "Thunder's (README, Your own operator)"
)

_MOST_LINES = 8  # of recordings, and of traces that are not captured, in the ledger


def render(report: Report) -> str:
    """The text of the whole report, without a newline at its end."""
    parts = [opening(report), *_traces(report.traces), "\n".join(memory(report.memory))]
    return "\n\n".join(filter(None, parts))


def opening(report: Report) -> str:
    """The lines that every form of the report opens with: what ran, what is eager, and why."""
    return "\n".join(_summary(report)) if report.traces or report.outside else nothing(report)


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
        on_data = problem is None or any(each in problem for each in ("data dependen", "tolist", "bool"))
        of_library = problem is None or any(each in problem for each in ("_ops", "not registered", "not yet supported"))
        if tried := [text for text, fits in ((_TO_PYTHON, on_data), (_TO_EXECUTOR, of_library)) if fits]:
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


def title(trace: TraceReport) -> str:
    """Whose trace this is, and which one."""
    return f"{trace.function}, {trace.kind}, compiled version {trace.entry}"


def calls(trace: TraceReport) -> str:
    """How often the trace ran, how often without its graphs and why, and the memory that it and its backward use."""
    if not trace.regions:
        return "nothing in it is captured, so its calls are not counted"
    said = f"{count(trace.calls, 'call')}, {trace.eager_calls} of them without graphs"
    if trace.fallbacks:
        said += f" ({', '.join(f'{reason}: {times}' for reason, times in trace.fallbacks.items())})"
    if trace.remark:
        said += f"; {trace.remark}"
    if trace.kind == "backward":
        return said
    if trace.fast_path_calls:
        said += f"; {trace.fast_path_calls} on the fast path, with checks in C++"
    if trace.no_fast_path:
        said += f"; slower on the host than it can be: {trace.no_fast_path}"
    return f"{said}; its memory pools hold {size(trace.arena_bytes)}"


def collectives(trace: TraceReport) -> Iterator[str]:
    """One line for all collectives of a kind in a group that are captured, and one for all that are eager."""
    alike: dict[tuple[object, ...], list[CollectiveReport]] = {}
    for each in trace.collectives:
        alike.setdefault((each.name, each.group, each.ranks, each.captured), []).append(each)
    for first, *others in alike.values():
        total = [first, *others]
        launches = len({each.launch for each in total})
        said = f"{len(total):,} {first.name} of {size(sum(each.nbytes for each in total))}"
        said += f" in {launches:,} launch{'es' if launches > 1 else ''}" if launches < len(total) else ""
        said += f" in the group {first.group} of {count(first.ranks, 'rank')}"
        said += ", captured" if first.captured else ", eager"
        yield f"{said}; {sum(each.overlaps for each in total):,} can overlap with compute"


def memory(ledger: MemoryReport) -> Iterator[str]:
    """The ledger: all together, each arena (a memory pool), each recording, and each trace that has none."""
    if not ledger.arenas and not ledger.previews:
        return
    said = f"Memory of the graphs: {size(ledger.pools)} in {count(len(ledger.arenas), 'memory pool')}"
    said += f", {size(ledger.workspaces)} in cuBLAS workspaces, {size(ledger.graphs)} in the driver"
    yield said + (f"; memory_budget is {size(ledger.budget)}" if ledger.budget is not None else "")
    for arena in ledger.arenas:
        held = ", in use by a call: a forward keeps it until its backward" if arena.is_held else ""
        yield f"  pool {arena.number}: {size(arena.pool)}{held}"
    for recording in ledger.recordings[:_MOST_LINES]:
        buffers, graphs, copied_in, copied_out = (
            size(sum(getattr(region, name) for region in recording.regions))
            for name in ("static_buffers", "graph", "copied_in", "copied_out")
        )
        arenas = " and ".join(map(str, recording.arenas))
        needs, without_graphs = size(recording.needs), size(recording.without_graphs)
        yield (
            f"  {recording.function}, compiled version {recording.entry}, {count(recording.replays, 'replay')}: "
            f"needs about {needs} of pool {arenas}, and {without_graphs} without graphs; "
            f"copies of inputs {buffers}; in the driver {graphs}; copied per call {copied_in} in, {copied_out} out"
        )
    for preview in ledger.previews[:_MOST_LINES]:
        needs, without_graphs = size(preview.needs), size(preview.without_graphs)
        yield (
            f"  {preview.function}, compiled version {preview.entry}, {preview.kind}, not captured: "
            f"would need about {needs} of a pool, and {without_graphs} without graphs"
        )
    if more := sum(max(0, len(parts) - _MOST_LINES) for parts in (ledger.recordings, ledger.previews)):
        yield f"  {more:,} more: see explain(fn).memory"


def region_counts(region: RegionReport) -> str:
    """What the region did so far and what one replay of it copies."""
    runs = ((region.captures, "capture"), (region.replays, "replay"), (region.eager_runs, "eager run"))
    said = ", ".join(count(number, noun) for number, noun in runs)
    said += f", {region.verified:,} verified" if region.verified else ""
    said = f"{said}; copied per replay: {size(region.bytes_in)} in, {size(region.bytes_out)} out"
    if region.microseconds is not None and region.eager_microseconds is not None:
        gain = region.eager_microseconds - region.microseconds
        said += f"; {region.microseconds:,.0f} µs as a graph, {region.eager_microseconds:,.0f} µs eagerly, "
        said += f"so it {'saves' if gain > 0 else 'costs'} {abs(gain):,.0f} µs a call"
        said += f"; its copies take {region.copy_microseconds:,.0f} µs" if region.copy_microseconds else ""
    return said


def notes(region: RegionReport) -> Iterator[str]:
    """Why it ended, why it runs eagerly, and what verification found."""
    if region.split:
        cost = f" ({region.split_microseconds:,.0f} µs of eager ops)" if region.split_microseconds is not None else ""
        yield f"ended by{cost}: {region.split}"
    if region.failure:
        why = "as verify= found its graph wrong" if region.quarantined else "as it could not be captured"
        yield f"runs eagerly, {why}: {region.failure}"
    if region.remark:
        yield f"in verification: {region.remark}"


def _summary(report: Report) -> Iterator[str]:
    first, *rest = ran(report)
    yield f"CUDA graphs: {first}; {headline(report.traces)}"
    yield from rest
    yield from failures(report)
    yield from lines.by_line(report)
    yield from unmatched(report)
    yield from measured(report)
    yield from shapes(report.shapes)


def unmatched(report: Report) -> Iterator[str]:
    """Names in options that no operator has."""
    for option, name, close in report.unmatched:
        hint = f"; did you mean {close!r}?" if close else ""
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


def entry(trace: TraceReport) -> str:
    """What a forward was compiled for, how long that took, and how long its captures did."""
    modes = {True: ["train mode"], False: ["eval mode"], None: []}[trace.training]
    modes.append("gradients enabled" if trace.grad else "gradients disabled")
    modes.append(f"autocast to {trace.autocast}" if trace.autocast else "no autocast")
    took = [f"compiled in {trace.compile_seconds:.2f} s"]
    took += [f"captures took {trace.capture_seconds:.3f} s"] if trace.capture_seconds else []
    said = [", ".join([*map(_input, trace.inputs[:4]), *([f"{len(trace.inputs) - 4} more"] * (len(trace.inputs) > 4))])]
    return "; ".join([f"for {said[0]}" if trace.inputs else "for no tensors", ", ".join(modes), ", ".join(took)])


def _input(brought: InputReport) -> str:
    strides = " or ".join(map(_tuple, brought.strides[:4]))
    return f"{brought.name} {brought.dtype} {_tuple(brought.shape)}" + (f" with strides {strides}" if strides else "")


def _tuple(sizes: Sequence[int | None]) -> str:
    """As Python writes it: (2, 4), (2,), and a question mark for what is known only at run time."""
    return str(tuple(sizes)).replace("None", "?")


def _traces(traces: Sequence[TraceReport]) -> Iterator[str]:
    """Each trace in full, but those that differ from an earlier one in the sizes of inputs only: a line for each."""
    full: list[TraceReport] = []
    for trace in traces:
        if (same := next((each for each in full if _are_alike(each, trace)), None)) is None:
            full.append(trace)
            yield "\n".join(_trace(trace))
        else:
            inputs = f"; {entry(trace)}" if trace.kind == "forward" else ""
            yield f"{title(trace)}: as compiled version {same.entry}{inputs}; {calls(trace)}"


def _are_alike(a: TraceReport, b: TraceReport) -> bool:
    """Whether the same ops of one function are in regions, or eager for the same reasons, and no capture failed."""
    failed = any(region.failure or region.remark for region in (*a.regions, *b.regions))
    ops = [[(op.name, op.line, op.verdict, op.detail) for op in trace.ops] for trace in (a, b)]
    return not failed and (a.function, a.kind) == (b.function, b.kind) and ops[0] == ops[1]


def _trace(trace: TraceReport) -> Iterator[str]:
    yield f"{title(trace)}: {headline([trace])}"
    if trace.kind == "forward":
        yield f"  {entry(trace)}"
    yield f"  {calls(trace)}"
    yield from _indent(collectives(trace))
    for region in trace.regions:
        yield f"  {region.name} on {region.device}, {count(region.ops, 'op')}: {region_counts(region)}"
        yield from _indent(f"    {note}" for note in notes(region))


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for text in lines for line in text.splitlines())
