"""A recording: what one call of a trace pair captured, and everything that has to hold for it to be replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_cg.compat.torch import in_profile
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime.arena import Arena, RecordingUse
from thunder_cg.runtime.backend import Graph
from thunder_cg.runtime.failures import note_replay
from thunder_cg.runtime.guards import Guard
from thunder_cg.runtime.inputs import CopiedInput
from thunder_cg.runtime.lent import Lent
from thunder_cg.runtime.lent_results import LentResult
from thunder_cg.runtime.outputs import Outputs
from thunder_cg.runtime.tensors import copy_all, is_whole


class RegionGraph:
    """The graph of one region in one recording, with its copies in and out.

    Args:
        copied: inputs to copy before a replay.
        written: arguments that the region may write: those that were copied in are copied back.
        label: the name of its replays in a profile.
        operators: those in the graph with their lines, as an error of a replay names them.
    """

    graph: Graph
    outputs: Outputs
    fixed: list[Any]  # per result: the address that it stays at, or None
    guard: Guard | None  # for the arguments that did not exist when the call began
    guarded: tuple[int, ...]
    scalars = slice(0, 0)  # of the arguments: those after the tensors, see Note [Kernel scalars]
    check: Any  # what a verifier has recorded of it, or None
    lent: Lent | None = None  # gradients that callers get in the arena's memory
    lent_results: Sequence[LentResult] = ()
    # Arguments whose version advances: not all that may be written are, and not all operators say so.
    touched: frozenset[int] = frozenset()

    def __init__(self, copied: Sequence[CopiedInput], written: Set[int], label: str, operators: str) -> None:
        self.label, self._operators = label, operators
        self._copied = tuple(copied)
        back = [each for each in copied if each.arg in written]
        self._copied_back = tuple(each for each in back if is_whole(each.buffer))  # by the graph
        self._copied_after = tuple(each for each in back if not is_whole(each.buffer))  # by operators
        self._back = [each.arg for each in self._copied_back]
        self._is_flat = any(each.is_flat for each in copied)
        self.copied_args = [each.arg for each in copied]  # the arguments that are copied in
        self.targets = [each.target for each in copied]
        self.nbytes_in = sum(t.numel() * t.element_size() for t in self.targets)
        self.buffer_nbytes = sum(each.buffer.untyped_storage().nbytes() for each in copied)  # of the pool

    @property
    def is_simple(self) -> bool:
        """Whether a replay copies arguments in, runs, and copies results out, and nothing else."""
        back = self._copied_back or self._copied_after
        return self.outputs.is_plain and not (back or self.touched or self._is_flat or self.lent_results)

    def sources(self) -> list[torch.Tensor]:
        """The memory that the graph copies out: of results, and of arguments that it has written."""
        return [*self.outputs.sources(), *(each.buffer for each in self._copied_back)]

    @property
    def nbytes_out(self) -> int:
        written = (each.target for each in (*self._copied_back, *self._copied_after))
        return self.outputs.nbytes + sum(t.numel() * t.element_size() for t in written)

    def admits(self, args: Sequence[Any]) -> bool:
        """Whether the arguments that eager operators made are what was captured."""
        return self.guard is None or self.guard.holds([args[i] for i in self.guarded])

    def copy_in(self, args: Sequence[Any]) -> None:
        """Copies what has to be copied to where the graph reads it, for a capture."""
        copy_all(self.targets, self._sources(args))

    def _sources(self, args: Sequence[Any]) -> list[torch.Tensor]:
        if self._is_flat:
            return [each.source(args) for each in self._copied]
        return [args[i] for i in self.copied_args]

    def replay(self, args: Sequence[Any]) -> list[Any]:
        """Copies in, runs, copies out and back what the region wrote, and hands out the results.

        Raises:
            ReplayRefused: nothing of it happened.
        """
        results = self.fixed.copy()
        try:
            targets = [*self.outputs.allocate(results), *[args[i] for i in self._back]]
            sources = self._sources(args)
            for result in self.lent_results:
                result.hand_out(results)
        except Exception as error:
            raise ReplayRefused(error) from error
        try:
            in_profile(self.label, self.graph.replay, sources, targets, args[self.scalars])
        except Exception as error:
            self.note(error)
            raise
        if self._copied_after:
            with torch.no_grad():  # as in a trace, whatever the caller's grad mode is
                for each in self._copied_after:
                    target = args[each.arg]
                    (target if each.arg in self.touched else target.data).copy_(each.buffer)
        if self.touched:  # before results are views of what was written: autograd refuses a view from before a write
            counted = {each.arg for each in self._copied_after}
            torch.autograd.graph.increment_version([args[i] for i in self.touched if i not in counted])
        if self.lent is not None:
            self.lent.hand_out(results)
        if not self.outputs.is_plain:
            with torch.no_grad():
                self.outputs.derive(results, args)
        return results

    @property
    def are_apart(self) -> bool:
        """Whether no two results of a replay share memory."""
        return self.outputs.is_plain and (self.lent is None or self.lent.are_apart)

    def note(self, error: Exception) -> None:
        """Notes on an error of a replay what is known of it."""
        if not isinstance(error, ReplayRefused):
            note_replay(error, self.label, self._operators, "compile without cudagraph_transform()")

    def unfilled_results(self, args: Sequence[Any]) -> list[Any]:
        """Results as a replay hands them out, still to be filled."""
        results = self.fixed.copy()
        with torch.no_grad():
            self.outputs.allocate(results)
            self.outputs.derive(results, args)
        return results


@dataclass(slots=True, eq=False)
class TraceRecording:
    """What a recording captured of one trace: the forward, or the backward for one layout of its inputs."""

    guard: Guard
    graphs: list[RegionGraph | None]  # by region; None: that region is eager
    since: int = 0  # how many calls its program had made
    scratch: Arena | None = None  # of a backward that does not allocate in the recording's arena
    key: Any = None  # the layout that it was captured for
    lent: list[Lent] = field(default_factory=list)  # what its replays lend
    beside: frozenset[object] = frozenset()  # tokens of the calls beside which it may be replayed
    spared: set[object] = field(default_factory=set)  # places that it does not write to: see Note [Lent results]


@dataclass(slots=True, eq=False)
class Recording(RecordingUse):
    """All graphs of one trace pair for one guard of the forward, in one arena."""

    arena: Arena
    forward: TraceRecording | None = None  # or of a backward trace whose forward has no region
    backwards: list[TraceRecording] = field(default_factory=list)  # newest first, one for each layout of gradients
    static: set[str] = field(default_factory=set)  # values that are views of static inputs
    owned: dict[str, torch.Tensor] = field(default_factory=dict)  # saved in the pool for a backward to be captured
    keeps_saved: bool = False  # whether ``owned`` is kept after that, so that more backwards can be captured
    dropped: bool = True  # whether no later call may replay it
    incomplete: bool = False  # whether the next call is to record all of it anew, since a region failed
    may_launch_early: bool = True  # whether a call without effects may launch before all its checks are made

    def arenas(self) -> list[Arena]:
        """Those that its graphs use."""
        scratch = (trace.scratch for trace in self.backwards if trace.scratch is not None)
        return [*dict.fromkeys((self.arena, *scratch))]

    def graphs(self) -> Iterator[Graph]:
        """Those that a call replays: of the forward, and of one backward."""
        traces = self.traces()[: 1 if self.forward is None else 2]
        return (region.graph for trace in traces for region in trace.graphs if region is not None)

    def saved(self) -> list[torch.Tensor]:
        """What its forward leaves in the arena."""
        graphs = self.forward.graphs if self.forward is not None else []
        fixed = (each for graph in graphs if graph is not None for each in graph.fixed if each is not None)
        return [*fixed, *self.owned.values()]

    def traces(self) -> list[TraceRecording]:
        """All that it has recorded."""
        return [*([self.forward] if self.forward is not None else []), *self.backwards]

    def close(self, *, may_wait: bool) -> None:
        """Destroys the graphs, after their work is done if that may be waited for. Regions run their ops afterwards."""
        self.dropped = True
        for trace in self.traces():
            for i, graph in enumerate(trace.graphs):
                if graph is not None:
                    graph.graph.close(may_wait=may_wait)
                    trace.graphs[i] = None
