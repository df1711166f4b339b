"""The ledger: bytes of each arena, recording and region. Memory that recordings share is counted once, by its arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from thunder_cg.report.programs import Located
from thunder_cg.runtime.arena import Arena
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import Recording, TraceRecording


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
    """What one call of a forward, and of its backward, has recorded."""

    function: str
    entry: int  # the number of the compiled version
    arenas: tuple[int, ...]  # numbers of those that its graphs use
    replays: int
    needs: int  # of its arena, by an estimate from the trace; recordings of one arena share its memory
    without_graphs: int  # what the same calls allocate at a time where all ops run eagerly, by the same estimate
    regions: tuple[RegionMemory, ...]


@dataclass(frozen=True, slots=True)
class MemoryPreview:
    """What a trace will need that is not captured yet, or does not fit into the memory budget."""

    function: str
    entry: int  # the number of the compiled version
    kind: str  # "forward" or "backward"
    needs: int  # of an arena, by an estimate from the trace, or as it turned out; the budget is compared with it
    without_graphs: int  # as in `RecordingMemory`


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """One arena, which the text calls a memory pool. Functions of one transform may share it."""

    number: int
    pool: int  # what its pools reserve
    workspaces: int  # of cuBLAS, outside of the pools; an idle capture stream keeps them for the next arena
    is_held: bool  # whether a call in flight has it


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The ledger of a compiled function, in bytes."""

    arenas: tuple[ArenaMemory, ...] = ()
    recordings: tuple[RecordingMemory, ...] = ()
    previews: tuple[MemoryPreview, ...] = ()
    pools: int = 0  # the sum over the arenas
    workspaces: int = 0  # the sum over the arenas
    graphs: int = 0  # the sum over the recordings
    budget: int | None = None  # of the pools of all arenas of the transform

    @classmethod
    def of(cls, programs: Iterable[Located]) -> MemoryReport:
        programs = [*programs]
        numbers: dict[Arena, int] = {}
        for located in programs:
            for arena in located.program.pair.arenas():
                numbers.setdefault(arena, len(numbers))
        arenas = tuple(
            ArenaMemory(number, arena.nbytes(), arena.workspace_nbytes(), arena.is_held())
            for arena, number in numbers.items()
        )
        recordings = tuple(_recordings(programs, numbers))
        previews = tuple(
            MemoryPreview(each.function, each.entry, program.kind, program.budget.needed, program.memory.without_graphs)
            for each in programs
            if (program := each.program).regions and not any(traces for _, traces in program.recorded())
        )
        return cls(
            arenas=arenas,
            recordings=recordings,
            previews=previews,
            pools=sum(arena.pool for arena in arenas),
            workspaces=sum(arena.workspaces for arena in arenas),
            graphs=sum(region.graph for recording in recordings for region in recording.regions),
            budget=next((located.program.budget.nbytes() for located in programs if located.program.regions), None),
        )


def _recordings(programs: Iterable[Located], numbers: dict[Arena, int]) -> Iterator[RecordingMemory]:
    found: dict[int, tuple[Located, Recording, list[tuple[Program, TraceRecording]]]] = {}
    for located in programs:
        for recording, traces in located.program.recorded():
            _, _, parts = found.setdefault(id(recording), (located, recording, []))
            parts += [(located.program, trace) for trace in traces]
    for located, recording, parts in found.values():
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
        )


def _regions(program: Program, trace: TraceRecording) -> Iterator[RegionMemory]:
    for region, graph, without_graphs in zip(program.regions, trace.graphs, program.memory.regions):
        if graph is not None:
            yield RegionMemory(
                name=region.name,
                static_buffers=graph.buffer_nbytes,
                graph=graph.graph.nbytes,
                copied_in=graph.nbytes_in,
                copied_out=graph.nbytes_out,
                without_graphs=without_graphs,
            )
