"""The report of a graphed step: how many calls replayed, why the others ran in Python, and what its graphs cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.errors import SkipReason
from thunder_cg.report import html, markdown, text
from thunder_cg.report.collectives import name_of
from thunder_cg.report.files import FunctionReport
from thunder_cg.report.memory import MemoryReport
from thunder_cg.report.step_lines import PRINTS, unreplayed
from thunder_cg.report.units import count, grouped
from thunder_cg.step import GraphedStep
from thunder_cg.step.calls import StepCollective

_ONCE, _IN_EACH = ", in the step", ", in each step"
_VALUES = re.compile(r"(?<= changed) from .*? to .*?(?= \(see |, in the step|, in each step|, between calls|$)")
_SEE = re.compile(r" \(see [^()]*\)")


@dataclass(frozen=True, slots=True, repr=False)
class StepReport(FunctionReport):
    """What became of a step of :func:`thunder_cg.graphed_step`. `print` it, leave it as a notebook cell's last line,
    `save` it to a file, or take `to_dict()`; `dump_dot` draws a graph, as long as the step exists."""

    function: str
    calls: int
    replays: int  # of a graph that an earlier call captured
    captures: int  # calls that captured the step, and then ran the graph
    in_python: Mapping[str, int]  # calls that ran the function in Python, by their reasons
    memory: MemoryReport  # the ledger; its recordings are the graphs that are kept
    # What each of these graphs does: its kernels, memcpys and memsets; recorded ops on the tape; nothing if not known.
    nodes: tuple[Mapping[str, int], ...] = ()
    collectives: tuple[tuple[str, ...], ...] = ()  # of each: how many of which kind, bytes, group and overlap, in words
    numbers: tuple[tuple[str, ...], ...] = ()  # of each: what replays set of the groups of fused optimizers
    raised: int = 0  # calls whose replay raised an error
    # What lines of the step do that no replay does, by place, as far as its code says so.
    unreplayed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    _title = "CUDA graphs of a step"

    @classmethod
    def of(cls, step: GraphedStep) -> StepReport:
        in_python = dict(_merged(step.skipped, step.if_repeated).most_common())
        nodes = tuple(recording.graph.counts() for recording in step.recordings)
        counts = step.calls, step.replays, step.captures
        said = tuple(tuple(_collectives(recording.communicates)) for recording in step.recordings)
        numbers = tuple(recording.numbers for recording in step.recordings)
        memory = MemoryReport.of_step(step)
        return cls(step.name, *counts, in_python, memory, nodes, said, numbers, step.raised, unreplayed(step))

    def lines(self) -> Iterator[str]:
        """The text, line by line."""
        replayed = f"{self.replays:,} of {count(self.calls, 'call')} replayed the whole step as one graph"
        raised = f"; {count(self.raised, 'replay')} raised an error" if self.raised else ""
        yield f"Step {self.function}: {replayed}; {count(self.captures, 'capture')}{raised}"
        if self.is_complete():
            yield "All calls after the first ones replay: there is nothing to change."
        if self.in_python:
            yield "In Python, with the graphs of the compiled modules in it:"
            for reason, number in self.in_python.items():
                first, *others = _parts(reason)
                parts = (f"  {number:,} x {first}", *(f"      {each}" for each in others))
                yield from (" ".join(part.splitlines()) for part in parts)  # a line of source may be several
        for number, kinds in enumerate(self.nodes):
            has = [", ".join(count(times, kind) for kind, times in kinds.items())] if kinds else []
            has += self.collectives[number] if self.collectives else ()
            has += [f"replays set {', '.join(keys)}" for keys in self.numbers[number : number + 1] if keys]
            if has:
                yield f"Graph {number}: {'; '.join(has)}"
        if lines := [*self._unreplayed()]:
            yield "What no replay does:"
            yield from (f"  {line}" for line in lines)
        yield from text.memory(self.memory, of_step=True)

    def _unreplayed(self) -> Iterator[str]:
        for place, what in self.unreplayed.items():
            # A graph that replays shows that all else is fine: float() of a number.
            if said := [each for each in what if not self.replays or each == PRINTS]:
                yield f"{', '.join(said)} at {place}"

    def is_complete(self) -> bool:
        """Whether no call ran in Python but the first ones of each layout of the batch. Other reasons have a fix."""
        are_first = all(number <= self.captures and "; " not in why for why, number in self.in_python.items())
        return self.replays > 0 and are_first and not self.raised

    def _text(self) -> str:
        return "\n".join(self.lines())

    def _markdown(self) -> str:
        return markdown.lines(self.lines())

    def _repr_html_(self) -> str:
        return html.lines(self.lines())


def _collectives(communicates: Mapping[ProcessGroup, Sequence[StepCollective]]) -> Iterator[str]:
    """``"2 all_reduce of 3.0 KiB in the group default_pg of 2 ranks; 1 can overlap with compute"``."""
    for group, begun in communicates.items():
        for alike in grouped(begun, lambda each: each.name):
            nbytes = [each.nbytes for each in alike]
            said = text.collectives_alike(alike[0].name, nbytes, name_of(group), group.size(), len(alike))
            yield f"{said}; {sum(each.overlaps for each in alike):,} can overlap with compute"


def _parts(reason: str) -> Iterator[str]:
    """What is said of a change, both values, the line, and each part of the fix; of another reason what there is."""
    problem, *fix = reason.split("; ")
    asides = [found[0] for pattern in (_VALUES, _SEE) if (found := pattern.search(problem)) is not None]
    for each in asides:
        problem = problem.replace(each, "", 1)
    yield from (problem, *(each[2:-1] if each.startswith(" (") else each.strip() for each in asides), *fix)


def _merged(reasons: Mapping[SkipReason, int], if_repeated: Mapping[SkipReason, str]) -> Counter[str]:
    """What is about one thing that changes as one reason, with the first values, and the most that is said of it.

    Of "n changed from 1 to 2, in the step" and "n changed from 2 to 3, in each step; make it a tensor" it makes
    "n changed from 1 to 2 and later to others, in each step; make it a tensor".
    """
    alike: dict[str, list[SkipReason]] = {}
    for reason in reasons:
        about = _VALUES.sub("", _SEE.sub("", reason.problem)).replace(_IN_EACH, _ONCE)
        alike.setdefault(about.partition(_ONCE)[0], []).append(reason)
    of_each = (Counter({_as_one(same, if_repeated): sum(map(reasons.__getitem__, same))}) for same in alike.values())
    return sum(of_each, Counter[str]())


def _as_one(same: Sequence[SkipReason], if_repeated: Mapping[SkipReason, str]) -> str:
    first, *others = same
    if not others:
        return str(first)
    said = (SkipReason(_VALUES.sub("", each.problem), each.fix or if_repeated.get(each, "")) for each in same)
    problem, fix = max(said, key=lambda each: len(str(each)))
    if any(_IN_EACH in each.problem for each in others):
        problem = problem.replace(_ONCE, _IN_EACH, 1)
    if (values := _VALUES.search(first.problem)) is not None:
        problem = problem.replace(" changed", f" changed{values[0]} and later to others", 1)
    return str(SkipReason(problem, fix))
