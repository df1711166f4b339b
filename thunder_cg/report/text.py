"""The report as plain text: the opening lines, then each trace with its regions, and the memory of the graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from thunder_cg.errors import SkipReason
from thunder_cg.report import opening
from thunder_cg.report.units import count, grouped, size

if TYPE_CHECKING:
    from thunder_cg.report.entries import InputReport
    from thunder_cg.report.memory import MemoryReport
    from thunder_cg.report.report import RegionReport, Report, TraceReport

_MOST_ALIKE = 3  # traces with the same ops as another one that ran otherwise
_MOST_VERSIONS = 8  # of a function, with other ops, besides those of which a capture failed
_MOST_REGIONS = 30  # of a trace, besides those that run eagerly
_MOST_LINES = 8  # of pools in the ledger, and of recordings
_MOST_PREVIEWS = 4  # of traces that are not captured


def render(report: Report) -> str:
    """The text of the whole report, without a newline at its end."""
    traces = ("\n".join([*_trace(trace), *_indent(others)]) for trace, others in in_short(report.traces))
    parts = [opening.opening(report), *traces, "\n".join(memory(report.memory))]
    return "\n\n".join(filter(None, parts))


def title(trace: TraceReport) -> str:
    """Whose trace this is, and which one."""
    return f"{trace.function}, {trace.kind}, compiled version {trace.entry}"


def calls(trace: TraceReport) -> str:
    """How often the trace ran, and how often without replaying its graphs, and why."""
    if not trace.regions:
        return "nothing in it is captured; the first lines count its calls"
    eager, captures = trace.eager_calls - trace.warm_ups, count(trace.captures, "capture")
    took = f" that took {trace.warm_up_seconds:,.1f} s" if trace.warm_up_seconds > 1 else ""  # as fusions compile
    parts = [f"{trace.replays:,} replayed", *([count(trace.warm_ups, "warm-up") + took] if trace.warm_ups else [])]
    parts += [*([captures] if trace.captures else []), *([f"{eager:,} eager"] if eager else [])]
    said = count(trace.calls, "call") + (f": {', '.join(parts)}" if trace.calls else "")
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
    return said


def collectives(trace: TraceReport) -> Iterator[str]:
    """One line for all collectives of a kind in a group that are captured, and one for all that are eager."""
    for alike in grouped(trace.collectives, lambda each: (each.name, each.group, each.ranks, each.captured)):
        first, launches = alike[0], len({each.launch for each in alike})
        said = collectives_alike(first.name, [each.nbytes for each in alike], first.group, first.ranks, launches)
        said += ", captured" if first.captured else ", eager"
        yield f"{said}; {sum(each.overlaps for each in alike):,} can overlap with compute"


def collectives_alike(name: str, nbytes: Sequence[int], group: str, ranks: int, launches: int) -> str:
    """``"30 all_reduce of 457.4 KiB in 1 launch in the group dp of 2 ranks"``; ``nbytes`` of each."""
    said = f"{len(nbytes):,} {name} of {size(sum(nbytes))}"
    said += f" in {launches:,} launch{'es' if launches > 1 else ''}" if launches < len(nbytes) else ""
    return f"{said} in the group {group} of {count(ranks, 'rank')}"


def memory(ledger: MemoryReport, *, of_step: bool = False) -> Iterator[str]:
    """The ledger: all together, each arena (a memory pool), each recording, and each trace that has none."""
    has_budget = ledger.budget is not None
    previews = ledger.previews if has_budget or not (ledger.recordings or of_step) else ()  # they are to be compared
    if not (ledger.recordings or previews):
        return
    parts = [f"{size(ledger.pools)} in {count(len(ledger.arenas), 'memory pool')}"] if ledger.arenas else []
    parts += [f"{size(ledger.workspaces)} in cuBLAS workspaces"] if ledger.workspaces else []
    parts += [f"{size(ledger.graphs)} in the driver"] if ledger.graphs else []
    said = f"Memory of the graphs: {', '.join(parts) or 'none yet'}"
    yield said + (f"; memory_budget is {size(ledger.budget)}" if ledger.budget is not None else "")
    version, about = ("graph", "at least") if of_step else ("compiled version", "about")
    for arena in ledger.arenas[:_MOST_LINES]:
        held = ", in use by a call: a forward keeps it until its backward" if arena.is_held else ""
        yield f"  pool {arena.number}: {size(arena.pool)}{held}"
    if (more := len(ledger.arenas) - _MOST_LINES) > 0:
        yield f"  {count(more, 'more pool')}: see explain(fn).memory"
    for recording in ledger.recordings[:_MOST_LINES]:
        buffers, graphs, copied_in, copied_out = (
            size(sum(getattr(region, name) for region in recording.regions))
            for name in ("static_buffers", "graph", "copied_in", "copied_out")
        )
        arenas = " and ".join(map(str, recording.arenas))
        needs, without_graphs = size(recording.needs), size(recording.without_graphs)
        gradients = f"gradients {size(recording.gradients)}; " if recording.gradients else ""
        driver = f"in the driver {graphs}; " if ledger.graphs else ""
        yield (
            f"  {recording.function}, {version} {recording.entry}, {count(recording.replays, 'replay')}: "
            f"needs {about} {needs} of pool {arenas}, and {without_graphs} without graphs; "
            f"{gradients}copies of inputs {buffers}; {driver}"
            f"copied per call {copied_in} in, {copied_out} out"
        )
    for preview in previews[:_MOST_PREVIEWS]:
        needs, without_graphs = size(preview.needs), size(preview.without_graphs)
        which = f"layout {preview.entry} of the batch" if of_step else f"{version} {preview.entry}, {preview.kind}"
        yield (
            f"  {preview.function}, {which}, not captured: "
            f"would need {about} {needs} of a pool, and {without_graphs} without graphs"
        )
    if more := max(0, len(ledger.recordings) - _MOST_LINES) + max(0, len(previews) - _MOST_PREVIEWS):
        yield f"  {more:,} more: see explain(fn).memory"


def region_counts(region: RegionReport) -> str:
    """What the region did so far and what one replay of it copies."""
    if not (region.captures or region.eager_runs or region.microseconds):
        return "has not run"
    runs = (
        (region.captures, "capture"),
        (region.replays - region.captures, "replay"),
        (region.eager_runs, "eager run"),
    )
    said = ", ".join(count(number, noun) for number, noun in runs)
    said += f", {region.verified:,} verified" if region.verified else ""
    if region.captures:
        said += f"; copied per replay: {size(region.bytes_in)} in, {size(region.bytes_out)} out"
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
        why = 'as select="measured" found that it does not pay' if region.deselected else why
        yield f"runs eagerly, {why}: {SkipReason(region.failure, region.fix)}"
    if region.remark:
        yield f"in verification: {region.remark}"


def entry(trace: TraceReport) -> str:
    """What a forward was compiled for, how long that took, and how long its captures did."""
    modes = {True: ["train mode"], False: ["eval mode"], None: []}[trace.training]
    modes.append("gradients enabled" if trace.grad else "gradients disabled")
    modes.append(f"autocast to {trace.autocast}" if trace.autocast else "no autocast")
    took = [f"compiled in {trace.compile_seconds:.2f} s"]
    took += [f"captures took {trace.capture_seconds:.3f} s"] if trace.capture_seconds else []
    inputs = [*map(_input, trace.inputs[:4]), *([f"{len(trace.inputs) - 4} more"] * (len(trace.inputs) > 4))]
    return "; ".join([f"for {', '.join(inputs) or 'no tensors'}", ", ".join(modes), ", ".join(took)])


def _input(brought: InputReport) -> str:
    more = [f"{len(brought.strides) - 4:,} more"] if len(brought.strides) > 4 else []
    strides = " or ".join([*map(_tuple, brought.strides[:4]), *more])
    return f"{brought.name} {brought.dtype} {_tuple(brought.shape)}" + (f" with strides {strides}" if strides else "")


def _tuple(sizes: Sequence[int | None]) -> str:
    """As Python writes it: (2, 4), (2,), and a question mark for what is known only at run time."""
    return str(tuple(sizes)).replace("None", "?")


def folded(traces: Iterable[TraceReport]) -> list[list[TraceReport]]:
    """The traces by their ops, each list in the order of the traces. One of which a capture failed is like none."""

    def key(trace: TraceReport) -> Hashable:
        ops = tuple((op.name, op.verdict, op.detail) for op in trace.ops)
        return id(trace) if _failed(trace) else (trace.kind, ops)

    return grouped(traces, key)


def in_short(traces: Iterable[TraceReport]) -> Iterator[tuple[TraceReport, list[str]]]:
    """Each trace that is shown in full, with lines about those that are not."""
    functions: dict[tuple[str, str], list[list[TraceReport]]] = {}
    for group in (groups := folded(traces)):
        functions.setdefault((group[0].function, group[0].kind), []).append(group)
    for group in groups:
        first, *others = group
        mine = functions[first.function, first.kind]
        shown = [each for i, each in enumerate(mine) if i < _MOST_VERSIONS or _failed(each[0])]
        if any(group is each for each in shown):
            more = sum(map(len, mine)) - sum(map(len, shown)) if group is shown[-1] else 0
            unsaid = f"and {count(more, 'more compiled version')} with other ops: see explain(fn).traces"
            yield first, [*_others(first, others), *[unsaid] * bool(more)]


def _others(first: TraceReport, others: Sequence[TraceReport]) -> Iterator[str]:
    """What is said of traces with the ops of the first one: how many are like it, and how the others ran."""
    same = [trace for trace in others if _ran(trace) == _ran(first)]
    rest = [trace for trace in others if _ran(trace) != _ran(first)]
    if same:
        last = f"{', the last of them ' if len(same) > 1 else ': '}{title(same[-1])}"
        yield f"and {len(same):,} more like it{last}"
    for trace in rest[:_MOST_ALIKE]:
        inputs = f"; {entry(trace)}" if trace.kind == "forward" else ""
        yield f"{title(trace)}: the same ops{inputs}; {calls(trace)}"
    if (more := len(rest) - _MOST_ALIKE) > 0:
        yield f"and {more:,} more with the same ops: see explain(fn).traces"


def _failed(trace: TraceReport) -> bool:
    return any(region.failure or region.remark for region in trace.regions)


def _ran(trace: TraceReport) -> tuple[object, ...]:
    """For what it was compiled and how often it ran, but no times."""
    inputs = [(each.dtype, each.shape, each.strides) for each in trace.inputs]
    modes = trace.training, trace.grad, trace.autocast
    ran = trace.calls, trace.replays, trace.warm_ups, trace.captures, trace.eager_calls, dict(trace.fallbacks)
    return inputs, modes, ran, trace.remark, trace.no_fast_path


def _trace(trace: TraceReport) -> Iterator[str]:
    yield f"{title(trace)}: {opening.headline([trace])}"
    if trace.kind == "forward":
        yield f"  {entry(trace)}"
    yield f"  {calls(trace)}"
    yield from _indent(collectives(trace))
    shown = [each for i, each in enumerate(trace.regions) if i < _MOST_REGIONS or each.failure or each.remark]
    for region in shown:
        yield f"  {region.name} on {region.device}, {count(region.ops, 'op')}: {region_counts(region)}"
        yield from _indent(f"    {note}" for note in notes(region))
    if more := len(trace.regions) - len(shown):
        yield f"  {count(more, 'more region')}: see explain(fn).traces"


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for text in lines for line in text.splitlines())
