"""What is not in a graph, by line of the user's source: root causes, graph breaks, and what Inductor got.

One line of source may have several of these. ``if x.norm().item() > 1:`` has an operator that is eager, and two graph
breaks of Dynamo's. A reader changes lines, so all that one line does stands below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thunder_cg.analysis.partition import NO_GAIN
from thunder_cg.report.breaks import ITEM, is_same
from thunder_cg.report.units import count, grouped

if TYPE_CHECKING:
    from thunder_cg.report.breaks import GraphBreak
    from thunder_cg.report.causes import CauseReport
    from thunder_cg.report.programs import Outside
    from thunder_cg.report.report import Report

_MOST_LINES = 30  # of source
_LONG = 80  # characters of a reason or fix, which is not said again for another line
HEADING = "What is not in a graph, by line of source, the most expensive first:"

_SCALARS = (
    "torch._dynamo.config.capture_scalar_outputs spares the graph break at such a read, and no more: the host still "
    "waits, and what uses the number is in no CUDA graph"
)


@dataclass(frozen=True, slots=True)
class _Problem:
    line: str  # "model.py:38", "near model.py:38", or that it is unknown
    source: str | None
    said: str
    why: str = ""
    fix: str = ""
    microseconds: float = 0.0
    regions: int = 0  # by how many it cuts what could be one
    ops: int = 0  # that are eager


def by_line(report: Report) -> Iterator[str]:
    """For each line of source its text, and below it each of its problems with the fix. Nothing if there are none.

    One line at the end is for what nothing has to change for.
    """
    of_report = [*map(_of_cause, report.causes), *_of_breaks(report.breaks), *_of_inductor(report.outside)]
    small = [problem for problem in of_report if problem.fix == NO_GAIN]
    of_report = [problem for problem in of_report if problem.fix != NO_GAIN]
    of_report.sort(key=lambda problem: _cost([problem]), reverse=True)
    lines = sorted(grouped(of_report, lambda problem: problem.line.removeprefix("near ")), key=_cost, reverse=True)
    if lines or small:
        yield HEADING
    said: dict[str, str] = {}  # reasons and fixes, with the lines that they are said of
    for problems in lines[:_MOST_LINES]:
        source = next((problem.source for problem in problems if problem.source), None)
        line = next((problem.line for problem in problems if not problem.line.startswith("near ")), problems[0].line)
        yield f"  {line}" + (f": {source}" if source else "")
        for problem in problems:
            yield f"      {problem.said}"
            for name, text in (("why", problem.why), ("to change it", problem.fix)):
                known = said.get(text)
                short = "as above" if known == line else text
                short = f"as for {known}" if known not in (None, line) and len(short) > _LONG else short
                if text:
                    yield f"        {name}: {short}"
                    said.setdefault(text, line)
    if len(lines) > _MOST_LINES:
        yield f"  {count(len(lines) - _MOST_LINES, 'more line')}: see explain(fn).causes, .breaks and .outside"
    if small:
        where = _few([*dict.fromkeys(problem.line.removeprefix("near ") for problem in small)])
        ops = count(sum(problem.ops for problem in small), "op")
        yield f"  {where}: {ops} eager, in too small a region to gain; nothing has to change"
    for cut in grouped(report.outside, lambda part: part.cost):
        graphs = [*dict.fromkeys(part.function for part in cut)]
        yield f"{_few(graphs)}, {'are' if len(graphs) > 1 else 'is'} {cut[0].cost}"
    if any(each.reason.startswith(ITEM) for each in report.breaks):
        yield _SCALARS


def by_inductor(joined: Iterable[Outside]) -> Iterator[str]:
    """For each line of source what of it Inductor compiled in a graph, and why Thunder did not."""
    groups = grouped(joined, lambda part: (part.line, part.reason))
    if groups:
        yield "In the graphs, but compiled by Inductor in the place of Thunder:"
    for alike in groups[:_MOST_LINES]:
        line, callers = _line(alike[0].line)
        yield f"  {line}: {_operators(alike)}{callers}: {alike[0].reason}"
    if len(groups) > _MOST_LINES:
        yield f"  {count(len(groups) - _MOST_LINES, 'more line')}: see explain(fn).joined"


def _operators(alike: Iterable[Outside]) -> str:
    times = sum((Counter({part.operator: part.count}) for part in alike), Counter[str]())
    return ", ".join(f"{operator}{_times(number)}" for operator, number in times.items())


def _cost(problems: list[_Problem]) -> tuple[float, int, int]:
    return (
        sum(problem.microseconds for problem in problems),
        sum(problem.regions for problem in problems),
        sum(problem.ops for problem in problems),
    )


def _of_cause(cause: CauseReport) -> _Problem:
    regions = f", adds {count(cause.added_regions, 'region')}" if cause.added_regions else ""
    cost = f", costs {cause.microseconds:,.0f} µs a call" if cause.microseconds is not None else ""
    where, near, line = cause.place.removeprefix("at ").rpartition("near ")  # "in a sum of gradients near model.py:38"
    name = f"{cause.name} {where}".strip()
    return _Problem(
        line=near + line,
        source=cause.source,
        said=f"{name} makes {count(cause.eager_ops, 'op')} eager{regions}{cost}: {cause.reason}",
        why=cause.detail,
        fix=cause.fix,
        microseconds=cause.microseconds or 0.0,
        regions=cause.added_regions,
        ops=cause.eager_ops,
    )


def _of_breaks(breaks: Iterable[GraphBreak]) -> Iterator[_Problem]:
    """One for all that are alike: compiled again for other inputs, a function breaks at the same lines."""
    breaks = [*breaks]

    def seen_from_most(part: GraphBreak) -> str | None:
        same = (each.line for each in breaks if each.reason == part.reason and is_same(part.line, each.line))
        return max(same, key=lambda line: len(line or ""))

    for alike in grouped(breaks, lambda part: (seen_from_most(part), part.source, part.reason)):
        line, callers = _line(seen_from_most(alike[0]))
        said = f"graph break{_times(len(alike))} after {_few([part.function for part in alike])}{callers}"
        yield _Problem(line, alike[0].source, f"{said}: {alike[0].reason}", fix=alike[0].fix, regions=1)


def _of_inductor(outside: Iterable[Outside]) -> Iterator[_Problem]:
    for alike in grouped(outside, lambda part: (part.line, part.reason, part.fix, part.apart)):
        line, callers = _line(alike[0].line)
        graphs = _few([*dict.fromkeys(part.function for part in alike)])
        operators = _operators(alike)
        are = "are" if ", " in operators else "is"
        said = f"{operators} of {graphs}{callers}, {are} left to Inductor: {alike[0].reason}"
        why = f"its piece is in no graph: {apart}" if (apart := alike[0].apart) else ""
        yield _Problem(line, alike[0].source, said, why, alike[0].fix, regions=1)


def _line(said: str | None) -> tuple[str, str]:
    """The line itself, and from where it is called: "model.py:38" and ", called from train.py:7"."""
    line, called, callers = (said or "a line unknown to Dynamo").partition(", called from ")
    return line, f"{called}{callers}"


def _times(number: int) -> str:
    return f" x{number}" if number > 1 else ""


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} more"
