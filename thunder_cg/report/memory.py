"""The ledger: bytes of each arena, recording and region. Memory that recordings share is counted once, by its arena.

That of a graphed step has the same form: a recording of it is one graph, as a recording with one region is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

from thunder_cg.report.programs import Located
from thunder_cg.runtime.arena import Arena
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import Recording, RegionGraph, TraceRecording
from thunder_cg.step import GraphedStep
from thunder_cg.step.recording import StepRecording


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """The graph of one region in one recording."""

    name: str
    static_buffers: int  # of the pool: what inputs are copied to; the graph may reuse it after their last use
    graph: int  # what the driver took when it instantiated the graph; 0 on the tape, and without cuda-bindings
    copied_in: int  # per call
    copied_out: int  # per call
    without_graphs: int  # what the ops allocate at a time in an eager call, by an estimate from the trace


@dataclass(frozen=True, slots=True)
class RecordingMemory:
    """What one call of a forward, and of its backward, has recorded; or one call of a graphed step."""

    function: str
    entry: int  # the number of the compiled version; of a graphed step, that of the graph, 0 for the newest one
    arenas: tuple[int, ...]  # numbers of those that its graphs use
    replays: int
    needs: int  # of its arena, by an estimate from the trace; recordings of one arena share its memory
    without_graphs: int  # what the same calls allocate at a time where all ops run eagerly, by the same estimate
    regions: tuple[RegionMemory, ...]
    gradients: int = 0  # of the arena: those that callers get without a copy; recordings may share them


@dataclass(frozen=True, slots=True)
class MemoryPreview:
    """What a trace, or a graphed step, will need that is not captured yet, or does not fit into the memory budget."""

    function: str
    entry: int  # the number of the compiled version; of a graphed step, that of the layout of the batch
    kind: str  # "forward" or "backward", or "step"
    needs: int  # of an arena, by an estimate from the trace, or as it turned out; the budget is compared with it
    without_graphs: int  # as in `RecordingMemory`


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """One arena, which the text calls a memory pool. Functions of one transform may share it."""

    number: int
    pool: int  # what its pools reserve
    workspaces: int  # of cuBLAS, outside of the pools; arenas share them, and they are kept for the next arena
    is_held: bool  # whether a call in flight has it


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The ledger of a compiled function, or of a graphed step, in bytes.

    What a graphed step needs is a lower bound, from a call in Python: see Note [What a step needs] in step/memory.py.
    """

    arenas: tuple[ArenaMemory, ...] = ()
    recordings: tuple[RecordingMemory, ...] = ()
    previews: tuple[MemoryPreview, ...] = ()
    pools: int = 0  # the sum over the arenas
    workspaces: int = 0  # of all arenas, each counted once
    graphs: int = 0  # the sum over the recordings
    budget: int | None = None  # of the pools of all arenas of the transform, or of the step

    @classmethod
    def of(cls, programs: Iterable[Located]) -> MemoryReport:
        programs = [*programs]
        numbers: dict[Arena, int] = {}
        for located in programs:
            for arena in located.program.pair.arenas():
                numbers.setdefault(arena, len(numbers))
        previews = tuple(
            MemoryPreview(each.function, each.entry, program.kind, program.budget.needed, program.memory.without_graphs)
            for each in programs
            if (program := each.program).regions and not any(traces for _, traces in program.recorded())
        )
        budget = next((located.program.budget.nbytes() for located in programs if located.program.regions), None)
        return cls._of(numbers, tuple(_recordings(programs, numbers)), previews, budget)

    @classmethod
    def of_step(cls, step: GraphedStep) -> MemoryReport:
        recordings = tuple(
            RecordingMemory(
                function=step.name,
                entry=number,
                arenas=(0,),
                replays=recording.replays,
                needs=recording.nbytes,
                without_graphs=recording.without_graphs,
                regions=(_region("step", recording, recording.without_graphs),),
                gradients=recording.gradient_nbytes,
            )
            for number, recording in enumerate(step.recordings)
        )
        previews = tuple(
            MemoryPreview(step.name, number, "step", ready.needs, ready.without_graphs)
            for number, ready in enumerate(step.awaiting())
        )
        return cls._of([step.arena] if step.arena is not None else [], recordings, previews, step.budget())

    @classmethod
    def _of(
        cls,
        arenas: Iterable[Arena],
        recordings: tuple[RecordingMemory, ...],
        previews: tuple[MemoryPreview, ...],
        budget: int | None,
    ) -> MemoryReport:
        arenas = [*arenas]
        workspaces = [arena.workspaces() for arena in arenas]
        numbered = tuple(
            ArenaMemory(number, arena.nbytes(), sum(mine.values()), arena.is_held())
            for number, (arena, mine) in enumerate(zip(arenas, workspaces))
        )
        return cls(
            arenas=numbered,
            recordings=recordings,
            previews=previews,
            pools=sum(arena.pool for arena in numbered),
            workspaces=sum(reduce(or_, workspaces, {}).values()),
            graphs=sum(region.graph for recording in recordings for region in recording.regions),
            budget=budget,
        )


def _recordings(programs: Iterable[Located], numbers: dict[Arena, int]) -> Iterator[RecordingMemory]:
    recordings: dict[int, tuple[Located, Recording, list[tuple[Program, TraceRecording]]]] = {}
    for located in programs:
        for recording, traces in located.program.recorded():
            _, _, parts = recordings.setdefault(id(recording), (located, recording, []))
            parts += [(located.program, trace) for trace in traces]
    for located, recording, parts in recordings.values():
        regions = tuple(region for program, trace in parts for region in _regions(program, trace))
        if not regions:  # none of them could be captured, or pays
            continue
        yield RecordingMemory(
            function=located.function,
            entry=located.entry,
            arenas=tuple(numbers[arena] for arena in recording.arenas() if arena in numbers),
            replays=recording.replays,
            needs=recording.nbytes,
            without_graphs=max(program.memory.without_graphs for program, _ in parts),
            regions=regions,
            gradients=sum(lent.nbytes for _, trace in parts for lent in trace.lent),
        )


def _regions(program: Program, trace: TraceRecording) -> Iterator[RegionMemory]:
    for region, graph, without_graphs in zip(program.regions, trace.graphs, program.memory.regions):
        if graph is not None:
            yield _region(region.name, graph, without_graphs)


def _region(name: str, graph: RegionGraph | StepRecording, without_graphs: int) -> RegionMemory:
    return RegionMemory(
        name=name,
        static_buffers=graph.buffer_nbytes,
        graph=graph.graph.nbytes,
        copied_in=graph.nbytes_in,
        copied_out=graph.nbytes_out,
        without_graphs=without_graphs,
    )
