"""The lines that every form of the report opens with: what ran, what is not in a graph and why, and what to change."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from thunder_cg.analysis.compile_errors import compiler_name
from thunder_cg.compat.dynamo_records import DynamoGuard, is_after_break
from thunder_cg.report import lines
from thunder_cg.report.units import count, grouped
from thunder_cg.runtime.changes import (
    CACHE_LENGTH,
    FEW,
    FEWER_SIZES,
    IF_CACHE,
    NEW_TOO_OFTEN,
    OF_STATIC_CACHE,
    VERSIONS,
    for_numbers,
    for_shapes,
)

if TYPE_CHECKING:
    from thunder_cg.report.entries import ChangeReport
    from thunder_cg.report.report import RegionReport, Report, TraceReport

NOTHING_COMPILED = (
    "Nothing is compiled yet: Thunder compiles at the first call. Call the function, then explain again. A method of a "
    "module, such as generate, calls the module that was not compiled: model.forward = thunderfx(model.forward)"
)
_NO_GRAPH = (
    "Dynamo had no graph for them. It has none of a call under a TorchDispatchMode, such as a FlopCounterMode, nor of "
    "later ones if the first one ran so, until torch._dynamo.reset(); of a call inside of torch.func's vmap or grad, "
    "which the function has to call itself; of a call that computes nothing with tensors; of a layer of torch.nn on "
    "which fully_shard was called, but of one that is in a module of your own, on which fully_shard is called; "
    "under torch.compiler.set_stance; or after torch._dynamo.config.recompile_limit was reached by the same code; "
    'TORCH_LOGS="dynamo" says more'
)
_FEWER = f"pass what changes from call to call as a tensor, or keep it to a few values; {IF_CACHE}"
_AFTER_BREAK = "change what ends the graph there, as said below"
_SIGNS = {  # of conditions, and what to do to meet them more often
    "a hook of": "have the hook write to a tensor in place",
    "requires_grad mismatch": "inputs with a gradient and those without have a version each, so nothing has to change",
    "dtype mismatch": "cast to one dtype before the call",
    re.escape(OF_STATIC_CACHE): CACHE_LENGTH,
    r"^len\(kwargs\)": "pass the same keyword arguments in each call",
    r"^(len\(|not )": f"keep the length; {IF_CACHE}; if the call adds to it, add after the call",
    "[=!]= '": "keep it to a few values",
}
_RAISE_LIMIT = (
    "set torch._dynamo.config.recompile_limit higher before the calls, if there are only a few more versions to make; "
    "where it is reached already, call torch._dynamo.reset(), after which Dynamo compiles everything anew"
)
_FEW_GRAPHS = 3  # that ran once, as each part of a function does in its first call


def opening(report: Report) -> str:
    """The lines that every form of the report opens with: what ran, what is eager, and why."""
    said = "\n".join(_summary(report)) if report.traces or report.outside else nothing(report)
    first, *rest = said.splitlines()
    return "\n".join([first, *filter(None, [report.note]), *rest])


def _summary(report: Report) -> Iterator[str]:
    first, *rest = ran(report)
    yield f"CUDA graphs: {first}; {headline(report.traces)}"
    yield from rest
    yield from (f"Other than in PyTorch, with and without graphs: {said}." for said in report.differs)
    yield from without_backward(report)
    yield from graphs_of_one_call(report)
    yield from failures(report)
    yield from left_to_python(report)
    yield from in_python(report)
    yield from in_torch(report)
    yield from (anew := [*compiled_anew(report)])
    yield from lines.by_line(report)
    yield from lines.by_inductor(report.joined)
    yield from unmatched(report)
    yield from measured(report)
    yield from deselected(report)
    yield from changes(unsettled(report), " ".join(anew))


def nothing(report: Report) -> str:
    """What to say of a function of which nothing is compiled."""
    if said := [*failures(report), *in_python(report)]:
        return "\n".join([" ".join(["Nothing is compiled.", *said]), *lines.by_line(report)])
    return NOTHING_COMPILED


def failures(report: Report) -> Iterator[str]:
    """In how many calls Thunder could not compile the function, where, and what to try."""
    if report.compile_failures:
        who = compiler_name(is_of_dynamo=report.is_of_dynamo)
        times = f"in {report.compile_failures:,} of {count(report.calls, 'call')}"
        times = count(report.compile_failures, "time") if report.python_calls else times  # in which nothing was raised
        said = f"{who} raised while it compiled, {times}: {report.compile_failure or 'it was interrupted'}."
        yield from said.splitlines()


def left_to_python(report: Report) -> Iterator[str]:
    """The parts of a function of which Dynamo compiles nothing, so that no trace has their operators."""
    if names := [each.part for each in report.breaks if each.part]:
        said = f"Not in these numbers {'is' if len(names) == 1 else 'are'} {' and '.join(names)}"
        yield f"{said}, which Dynamo leaves to plain Python, as said below."


def in_python(report: Report) -> Iterator[str]:
    """How many calls Dynamo ran in plain Python, without Thunder, why, and what to do."""
    has_none = bool(report.breaks) and not report.traces and not report.outside
    if report.python_calls or has_none:
        others = "more " if report.traces else ""
        calls = count(report.python_calls, f"{others}call") if report.python_calls else "Its calls"
        is_known = report.limits or ((report.breaks or report.compile_failures) and not report.traces)
        yield f"{calls} ran in plain Python, without Thunder{'.' if is_known else f': {_NO_GRAPH}.'}"
    for each in report.limits:
        shared = "" if report.traces else ", of other functions or instances with the same code"
        yield (
            f"Dynamo compiles {each.function} no more: it has {count(each.versions, 'compiled version')}{shared}, and "
            f"torch._dynamo.config.recompile_limit is {each.limit}. Calls that fit none of them run in plain Python."
        )
        if each.reason and not shared:
            yield f"One of them holds only for `{each.reason}`; {_fewer([(each.function, each.reason)])}."
    if report.limits:
        yield f"To change that: {_RAISE_LIMIT}."


def in_torch(report: Report) -> Iterator[str]:
    """How many calls of which graphs PyTorch ran because of their sizes, and what to do."""
    for each in report.new_sizes:
        yield (
            f"{count(each.calls, 'call')} of {each.function} ran in PyTorch, without Thunder and graphs: "
            f"{NEW_TOO_OFTEN}. To change that: {FEWER_SIZES}."
        )


def compiled_anew(report: Report) -> Iterator[str]:
    """What Dynamo compiled more than once, because of which values, and what to do."""
    for mine in grouped(report.recompilations, lambda each: each.function):
        causes = (
            f"`{each.condition}`{f' ({each.line})' if each.line else ''}{f' x{each.count}' if each.count > 1 else ''}"
            for each in mine
        )
        times = count(sum(each.count for each in mine), "time")
        yield f"Dynamo compiled {mine[0].function} anew {times}, as calls did not meet: {', '.join(causes)}"
    values = [each for each in report.recompilations if not each.is_mode]
    if values and not is_complete(report):
        fewer = _fewer((each.function, each.condition) for each in values)
        yield f"Each version warms up and has graphs of its own. To have fewer: {fewer}."


def _fewer(conditions: Iterable[tuple[str, str]]) -> str:
    """What to do so that calls meet more of the conditions that Dynamo compiled functions for."""
    said = [part for function, condition in conditions for part in _fewer_of_one(function, condition).split("; ")]
    return "; ".join(dict.fromkeys(said))


def _fewer_of_one(function: str, condition: str) -> str:
    guard = DynamoGuard.of(condition)
    if guard.is_before_break or (guard.size is not None and is_after_break(function)):
        return _AFTER_BREAK
    if guard.size is not None:
        dim, sizes = guard.size
        return for_shapes([(*[0] * dim, each) for each in sizes])
    if guard.own_list:
        return f"add to {guard.own_list} after the call, not in it"
    if guard.number is not None:
        name, value = guard.number
        of_module = "if calls change {}, make it a tensor, and write it in place"
        how = of_module if "." in name else "pass {} as a 0-dim tensor"
        return f"{how.format(name)}{for_numbers([ast.literal_eval(value)])}"
    if guard.unset:
        return f"make {guard.unset} before the first call; {IF_CACHE}"
    return next((fix for sign, fix in _SIGNS.items() if re.search(sign, condition)), _FEWER)


def ran(report: Report) -> Iterator[str]:
    """How many calls replayed, and why the others did not; how often it was called if there is nothing to replay."""
    having = [trace for trace in report.traces if trace.regions]
    if report.uncached:
        yield f"none, in {count(report.calls, 'call')}"
        yield 'Not replayed: with cache="no caching", Thunder compiles each call anew, and no graph is kept'
        yield "To change that: compile without cache=; the rest of this report is about the last call"
        return
    in_steps = {(trace.function, trace.entry) for trace in having if trace.is_in_steps}
    if having and in_steps.issuperset((trace.function, trace.entry) for trace in having):
        yield "none of its own, as all calls ran inside of graphed steps, whose graphs hold them (see explain(step))"
        return
    without = _calls_without_regions(report)
    said = []
    graphs = len({trace.function for trace in (report.traces if without else having)})
    for kind, noun in (("forward", "call"), ("backward", "backward")):
        of_kind = [trace for trace in having if trace.kind == kind]
        calls = sum(trace.calls for trace in of_kind) + (without if having and kind == "forward" else 0)
        if calls:
            of = f" of {graphs} graphs" if graphs > 1 and kind == "forward" else ""
            said.append(f"{sum(trace.replays for trace in of_kind):,} of {count(calls, noun)}{of}")
    if not any(trace.calls for trace in having):
        ran_once = without or report.compile_failures
        yield f"none, in {count(report.calls, 'call')}" if ran_once else "no call yet" if having else "none"
        return
    yield f"{' and '.join(said)} replayed"
    if why := [*_not_replayed(report, having, without)]:
        yield f"Not replayed: {'; '.join(why)}"
    if is_complete(report):
        yield "All calls after warm-up and capture replay, and no operator is eager: there is nothing to change."
    for reason, fix in dict.fromkeys(each for trace in having for each in trace.fixes.items()):
        yield f"To change that {re.split(r' [(]|, |: ', reason)[0]}: {fix}"


def without_backward(report: Report) -> Iterator[str]:
    """The functions whose backward never ran, although the forward did more than once, and what to do about it.

    Where another backward has run, they may be a part of training, such as a metric. What has no regions counts no
    calls.
    """
    never_ran = (each for each in report.traces if each.kind == "backward" and each.regions and not each.calls)
    backwards = {(trace.function, trace.entry) for trace in never_ran}
    forwards = (trace for trace in report.traces if trace.kind == "forward" and trace.calls > 1)
    unused = [each for each in forwards if (each.function, each.entry) in backwards]
    if unused:
        more = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
        trains = any(trace.kind == "backward" and trace.calls for trace in report.traces)
        fix = (
            "compute what no gradient needs, such as a metric or an evaluation, under torch.no_grad()"
            if trains
            else "for inference, call it under torch.no_grad(), or after model.requires_grad_(False)"
        )
        where = f"{unused[0].function}, compiled version {unused[0].entry}{more}"
        yield f"No backward ran of {where}: {fix}, which keeps nothing for a backward."


def graphs_of_one_call(report: Report) -> Iterator[str]:
    """How many graphs Dynamo made for one call each, and what to do about it."""
    calls: Counter[str] = Counter()
    for trace in report.traces if report.is_of_dynamo else ():
        calls[trace.function] += trace.calls if trace.kind == "forward" else 0
    once = [function for function, times in calls.items() if times == 1]
    if len(once) > _FEW_GRAPHS and not report.recompilations:  # which say what
        yield (
            f"Dynamo made {len(once):,} graphs that ran once, the last of them {once[-1]}: calls bring something new "
            f'each time; TORCH_LOGS="recompiles" in the environment has Dynamo say what. To change that: {_FEWER}.'
        )


def _calls_without_regions(report: Report) -> int:
    """Calls of versions in which nothing is captured. Thunder counts all calls, and they are the rest."""
    forwards = [trace for trace in report.traces if trace.kind == "forward"]
    if all(trace.regions for trace in forwards):
        return 0
    return max(0, report.calls - report.compile_failures - sum(trace.calls for trace in forwards if trace.regions))


def is_complete(report: Report) -> bool:
    """Whether nothing can be better: all operators are in graphs, and all calls that may replay do."""
    having = [trace for trace in report.traces if trace.regions]
    eager = sum(trace.counts["eager"] for trace in report.traces)
    graphs = report.outside or report.breaks or report.limits or report.python_calls or report.new_sizes
    others = (
        graphs
        or report.differs
        or unsettled(report)
        or report.compile_failures
        or report.unmatched
        or any(trace.fallbacks for trace in having)
    )
    return not (eager or others) and all(trace.replays and not trace.awaiting_capture for trace in having)


def unsettled(report: Report) -> list[ChangeReport]:
    """The changes that cost something still: not those to few values, for all of which there are graphs by now."""
    forwards = (trace for trace in report.traces if trace.kind == "forward" and trace.regions)
    new = {trace.function for trace in forwards if not trace.replays}
    return [each for each in report.changes if each.kind not in VERSIONS or each.values > FEW or each.function in new]


def _not_replayed(report: Report, traces: Sequence[TraceReport], without: int) -> Iterator[str]:
    for number, noun in ((sum(t.warm_ups for t in traces), "warm-up"), (sum(t.captures for t in traces), "capture")):
        if number:
            yield count(number, noun)
    if without:
        yield f"{count(without, 'call')} of a compiled version without regions"
    reasons = sum((Counter(trace.fallbacks) for trace in traces), Counter[str]())
    yield from (f"{times:,} x {reason}" for reason, times in reasons.most_common())
    if waiting := [trace for trace in traces if trace.awaiting_capture]:
        versions = [*dict.fromkeys(f"{trace.function}, compiled version {trace.entry}," for trace in waiting)]
        of = f" of {versions[0]}" if len(versions) == 1 else f" of {len(versions)} compiled versions"
        of = of if len(waiting) < len(traces) else ""
        kinds = {change.kind for change in report.changes}
        same = ["shapes", "strides", *(["alignment"] if "alignment" in kinds else [])]
        same += ["Python numbers"] if kinds & {"number", "attribute"} else []
        same += ["other arguments"] if "constant" in kinds else []
        same += ["lengths of lists"] if "items" in kinds else []
        what = f"{', '.join(same[:-1])} and {same[-1]}"
        yield f"the next call{of} with inputs of the same {what} will capture"


def headline(traces: Sequence[TraceReport]) -> str:
    """How many regions hold how many of the ops, and how many ops stay eager."""
    counts = sum((trace.counts for trace in traces), Counter[str]())
    regions = sum(len(trace.regions) for trace in traces)
    work = counts["capture"] + counts["eager"]
    versions = {(trace.function, trace.entry) for trace in traces}
    of = f" in {len(versions):,} compiled versions" if len(versions) > len({name for name, _ in versions}) else ""
    held = f"{count(regions, 'region')} with {counts['capture']:,} of {count(work, 'op')}{of}"
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
        yield "The tape stands in for CUDA graphs: what regions save or cost on a GPU is not known from these times."
    elif losing := [region for region in regions if not region.pays]:
        names = ", ".join(f"{r.name} ({_graph(r):,.0f} µs as a graph, {_eager(r):,.0f} µs eagerly)" for r in losing)
        larger = "Larger ones pay more: remove what splits them, or leave their operators eager with deny="
        yield f"Regions that do not pay: {names}. {larger}."


def deselected(report: Report) -> Iterator[str]:
    """The regions that ``select="measured"`` leaves eager, with both times, and what to do."""
    regions = [region for trace in report.traces for region in trace.regions if region.deselected]
    if regions:
        names = ", ".join(f"{region.name} ({region.failure})" for region in regions)
        yield f'select="measured" leaves eager what does not pay: {names}. To change that: {regions[0].fix}.'


def _graph(region: RegionReport) -> float:
    return region.microseconds or 0.0


def _eager(region: RegionReport) -> float:
    return region.eager_microseconds or 0.0


def changes(parts: Sequence[ChangeReport], above: str = "") -> Iterator[str]:
    """Because of what calls compiled, warmed up or captured anew, what that costs, and what to do about it.

    Args:
        above: what was said before.
    """
    said: set[str] = set()
    for part in parts:
        begins = re.split("[,;]", part.fix)[0]
        fix = f"as above, {begins}" if part.fix in said or part.fix in above else part.fix
        yield f"{part.function}: {part.problem}; {part.cost}; {fix}"
        said.add(part.fix)
