"""One cache entry of Thunder's as the fast paths see it: its traces, its only region, and the results of a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from thunder_cg.analysis.ops import computing
from thunder_cg.compat.settings import any_autocast_enabled
from thunder_cg.compat.thunder import CacheEntry, PrimIDs, Proxy, TraceCtx, no_autocast, tree_flatten
from thunder_cg.errors import ReplayRefused
from thunder_cg.executor import executor
from thunder_cg.fastpath.guard import PrologueGuard
from thunder_cg.fastpath.state import GuardMismatch, Unsupported
from thunder_cg.runtime.guards import Guard
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import RegionGraph, TraceRecording


class Compiled:
    """What Thunder made of one cache entry with ``options`` of thunder.jit, and what the transform made of that."""

    def __init__(self, entry: CacheEntry, forward: Program, backward: Program | None, options: dict[str, Any]) -> None:
        self.entry, self.forward, self.backward, self.options = entry, forward, backward, options
        trace = entry.epilogue_traces[-1]
        self.has_plain_epilogue = all(s.sym.id in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN) for s in trace.bound_symbols)
        self.epilogue = entry.epilogue_fn
        if self.has_plain_epilogue:
            self.epilogue = trace.python_callable(include_decorators=False)

    @cached_property
    def results(self) -> dict[str, int]:
        """The results of the forward's only region, and their positions. `Unsupported` if the trace holds more."""
        return results_of_region(self.entry.computation_traces[-1])


class OnlyRegion:
    """The region of a program that is one region, in one recording. `Unsupported` if the program is not."""

    def __init__(self, program: Program, recorded: TraceRecording | None) -> None:
        graph = recorded.graphs[0] if recorded is not None and program.is_one_region else None
        if recorded is None or graph is None or graph.guard is not None:
            raise Unsupported("the trace is not one region")
        self.guard: Guard = recorded.guard
        self.beside, self.spared = recorded.beside, recorded.spared
        self.graph: RegionGraph = graph
        self._program = program
        self._written = program.inputs.written
        self.inputs = program.regions[0].input_names
        if self.inputs != program.inputs.names:
            raise Unsupported("the region's inputs are not those of the trace")
        self.stats = program.regions[0].stats

    def replay(self, tensors: list[Any]) -> list[Any]:
        """Replays the graph as a call of the program, and counts the call. `ReplayRefused` if nothing ran."""
        try:
            results = self.graph.replay(tensors)
        except ReplayRefused:
            raise
        except Exception:
            self._program.count_raised(is_counted=False)
            raise
        self._program.count_replay()
        self.stats.replays += 1
        return results

    def adapt_guard(self, tensors: list[Any]) -> None:
        """Has the guard hold for calls like the present one, with these tensors. `GuardMismatch` if it is for others.

        The C++ check of tensors depends on autocast, and Thunder turns autocast off before the guard is made.
        """
        guard = self.guard
        if not (no_autocast(guard.holds)(tensors) if any_autocast_enabled() else guard.holds(tensors)):
            raise GuardMismatch("the graph was captured with other tensors")
        if any_autocast_enabled():
            self.guard = Guard(tensors, guard.static, self._written, guard.settings)


class MetadataGuard:
    """The check of some tensors that the prologue looks at. `GuardMismatch` if one is not what it expects."""

    def __init__(self, guard: PrologueGuard, names: Sequence[str], values: list[Any]) -> None:
        names = [name for name in names if name in guard.place]
        self._pick = guard.picker(names)
        tensors = list(self._pick(values))
        for name, tensor in zip(names, tensors):
            try:
                guard.metadata[name].check(tensor)
            except AssertionError as error:
                raise GuardMismatch(f"{name}: {error}") from None
        self.is_empty = not names
        self._guard = Guard(tensors, (), frozenset()) if names else None

    def holds(self, values: list[Any]) -> bool:
        return self._guard is None or self._guard.holds(list(self._pick(values)))


class CallResult:
    """How the results of a region become what the caller gets. `Unsupported` if the region does not make all of it.

    ``only`` is the position of the region's result that is all that the caller gets, if there is one.
    """

    def __init__(self, compiled: Compiled, guard: PrologueGuard, output: Sequence[Any]) -> None:
        self._pick_passed_on = guard.picker(guard.passed_on)
        self._order = [compiled.results.get(name, -1) for name in names_of(output)]
        if -1 in self._order:
            raise Unsupported("something is returned that the region does not make")
        self._epilogue = compiled.epilogue
        self.only: int | None = None
        if compiled.has_plain_epilogue:
            trace = compiled.entry.epilogue_traces[-1]
            names = [s.output.name for s in trace.bound_symbols if s.sym.id is PrimIDs.UNPACK_TRIVIAL]
            returned = trace.bound_symbols[-1].args[0]
            at = names.index(returned.name) if isinstance(returned, Proxy) else -1
            self.only = self._order[at - len(guard.passed_on)] if at >= len(guard.passed_on) else None

    def of(self, values: list[Any], results: Sequence[Any]) -> Any:
        """The caller's result, given the values that the prologue looked up and the region's results."""
        return self._epilogue(*self._pick_passed_on(values), *[results[i] for i in self._order])


def results_of_region(trace: TraceCtx) -> dict[str, int]:
    """The results of a trace's only region, and their positions. Another transform may have put something beside it."""
    if others := [s.name_with_module() for s in computing(trace) if s.sym.executor is not executor]:
        raise Unsupported(f"the trace holds {', '.join(others[:3])} beside the region")
    regions = [s for s in trace.bound_symbols if s.sym.executor is executor and s.subsymbols]
    if len(regions) != 1:
        raise Unsupported("the trace is not one region")
    return {proxy.name: i for i, proxy in enumerate(regions[0].flat_proxy_outs)}


def names_of(tree: Any) -> list[str]:
    """The names of the proxies in a tree, in order; empty for what is no proxy."""
    return [leaf.name if isinstance(leaf, Proxy) else "" for leaf in tree_flatten(tree)[0]]
