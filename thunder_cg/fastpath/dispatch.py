"""Which calls of a compiled module go the short way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from thunder import CacheEntry
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.core.trace import TraceCtx, _tracectx

from thunder_cg.fastpath.exclusive import Checks, are_exclusive, checks
from thunder_cg.fastpath.guards import GuardMismatch, ParameterCache, PrologueGuard, Unsupported
from thunder_cg.fastpath.inference import inference
from thunder_cg.fastpath.training import MISS, Compiled, TracedFastPath, TrainingFastPath
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import Recording

Call = Callable[..., Any]  # with a call's arguments; returns the call's result or MISS
_tracing = _tracectx.get  # with None as its argument: the trace that is being made on this thread, if any
_OVERTAKEN = "Thunder asks another compiled version first, which may be for the same calls"
_MAX_WAYS = 8  # per cache entry, for traces of several regions: one for each layout of inputs


class Entry:
    """One cache entry of Thunder's, and the short ways that it has."""

    def __init__(self, module: ThunderModule, compiled: Compiled, parameters_cache: ParameterCache) -> None:
        self.compiled = compiled
        self._stats = module._lc_cs
        self._guard = PrologueGuard(
            module, compiled.entry.prologue_traces[-1], compiled.forward.inputs, parameters_cache
        )
        self._replays: list[tuple[Recording, Call]] = []  # of inference
        self._straight: list[tuple[Recording, TrainingFastPath]] = []
        self._through: list[TracedFastPath] = []
        self._is_straight = True

    @property
    def calls(self) -> list[Call]:
        """What to call, in this order, until one does not refuse."""
        return [*(call for _, call in self._replays), *([self._look_up] if self._straight or self._through else [])]

    def _look_up(self, *args: Any, **kwargs: Any) -> Any:
        """Tries the ways that start from the values which the prologue's guard looks up."""
        values = self._guard.values(args, kwargs)
        if values is None:
            return MISS
        ways: list[TrainingFastPath | TracedFastPath] = [*(way for _, way in self._straight), *self._through]
        for way in ways:
            result = way(values)
            if result is not MISS:
                self.compiled.forward.fast_path_calls += 1
                self._count()
                return result
        return MISS

    def _count(self) -> None:
        """Keeps Thunder's statistics, which its own way would have kept."""
        stats, entry = self._stats, self.compiled.entry
        stats.calls += 1
        stats.cache_hits += 1
        if stats.last_prologue is not entry.prologue_fn:
            stats.last_prologue = entry.prologue_fn
            stats.last_traces = entry.computation_traces
            stats.last_prologue_traces = entry.prologue_traces

    def drop_caches(self) -> None:
        """Thunder's way is being taken: lets go of what is only kept to be fast."""
        for _, way in self._straight:
            way.drop_caches()

    def build_fast_paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the short ways for what has been recorded, after a call that had to go Thunder's way."""
        recordings = self.compiled.forward.recordings
        self._replays = [known for known in self._replays if not known[0].dropped]
        self._straight = [known for known in self._straight if not known[0].dropped]
        known = [recording for recording, _ in (*self._replays, *self._straight)]
        new = [r for r in recordings if all(r is not recording for recording in known)]
        values = self._guard.values(args, kwargs)  # the first time takes long, so not only once there is a recording
        if not recordings or values is None:
            return
        try:
            for recording in new if self._is_straight else ():
                with suppress(GuardMismatch):
                    self._add(recording, values)
        except Unsupported as error:
            self._is_straight = False
            self.compiled.forward.no_fast_path = str(error)
        if not self._is_straight:
            way = TracedFastPath(self.compiled, self._guard, values)
            self._through = [way, *self._through][:_MAX_WAYS]

    def _add(self, recording: Recording, values: list[Any]) -> None:
        if self.compiled.backward is None:
            call = inference(self.compiled, self._guard, recording, values, self._count)
            self._replays.insert(0, (recording, call))
        else:
            self._straight.insert(0, (recording, TrainingFastPath(self.compiled, self._guard, recording, values)))


class Dispatch:
    """Stands in for a compiled module's forward: tries the short ways, then Thunder's."""

    def __init__(self, module: ThunderModule) -> None:
        self._module = module
        self._thunders = module._forward_fn
        self._homes = ParameterCache(module)
        self._entries: list[Entry] = []
        self._calls: list[Call] = []  # of all entries
        self._unsupported: list[CacheEntry] = []
        self._apart = torch._dynamo.disable(self.__call__)
        self._stats = module._lc_cs
        self._known = 0  # how many cache entries there were
        # By the identity of each cache entry: itself, its checks, and whether it and an older one are exclusive.
        self._checks: dict[int, tuple[CacheEntry, Checks, dict[int, bool]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # it would look into whatever it can
            return self._apart(*args, **kwargs)
        if _tracing(None) is None:
            for call in self._calls if len(self._stats.interpreter_cache) == self._known else ():
                result = call(*args, **kwargs)
                if result is not MISS:
                    return result
            for entry in self._entries:
                entry.drop_caches()
        result = self._thunders(*args, **kwargs)
        if _tracing(None) is None:
            self._build_fast_paths(args, kwargs)
            self._calls = [call for entry in self._certain() for call in entry.calls]
        return result

    def _certain(self) -> list[Entry]:
        """The entries that no newer one could come before, newest first, as Thunder tries them."""
        cache = self._stats.interpreter_cache[::-1]
        known = {id(entry) for entry in cache}
        self._known = len(cache)
        self._entries = [entry for entry in self._entries if id(entry.compiled.entry) in known]
        for key in self._checks.keys() - known:
            del self._checks[key]
        for entry in cache:
            if id(entry) not in self._checks:
                self._checks[id(entry)] = entry, checks(entry.prologue_traces[-1]), {}
        entries = {id(entry.compiled.entry): entry for entry in self._entries}
        found = []
        for i, entry in enumerate(cache):
            if id(entry) in entries:
                if all(self._are_exclusive(newer, entry) for newer in cache[:i]):
                    found.append(entries[id(entry)])
                else:
                    entries[id(entry)].compiled.forward.no_fast_path = _OVERTAKEN
        return found

    def _are_exclusive(self, newer: CacheEntry, older: CacheEntry) -> bool:
        _, expected, others = self._checks[id(newer)]
        if id(older) not in others:
            others[id(older)] = are_exclusive(expected, self._checks[id(older)][1])
        return others[id(older)]

    def _build_fast_paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stats = self._module._lc_cs
        used = next((e for e in reversed(stats.interpreter_cache) if e.prologue_fn is stats.last_prologue), None)
        if used is None or any(used is entry for entry in self._unsupported):
            return
        entry = next((e for e in self._entries if e.compiled.entry is used), None)
        forward = _program(used.computation_traces)
        try:
            if entry is None:
                if forward is None or not forward.regions:
                    return
                entry = Entry(self._module, self._compiled(used, forward), self._homes)
                self._entries.append(entry)
            entry.build_fast_paths(args, kwargs)
        except GuardMismatch:
            pass
        except Exception as error:  # whatever it is, Thunder's way is there
            self._unsupported.append(used)
            if forward is not None:
                forward.no_fast_path = str(error) if isinstance(error, Unsupported) else repr(error)

    def _compiled(self, entry: CacheEntry, forward: Program) -> Compiled:
        if self._module._lc_cd.cache_option is not CACHE_OPTIONS.CONSTANT_VALUES:
            raise Unsupported("Thunder's cache is not the one for constant values")
        backward = _program(entry.backward_traces) if entry.backward_fn else None
        if entry.backward_fn and backward is None:
            raise Unsupported("the backward was not partitioned")
        return Compiled(entry, forward, backward, self._module._lc_cd.compile_options)


def _program(traces: list[TraceCtx]) -> Program | None:
    """The program of the last partition: computation traces end with one, or with what Thunder made of it."""
    found = (getattr(trace.get_provenance(), "program", None) for trace in reversed(traces))
    return next((program for program in found if program is not None), None)


def install(module: ThunderModule) -> None:
    """Gives a module that Thunder has compiled the short way, if it has not got it."""
    if not isinstance(module._forward_fn, Dispatch):
        module._forward_fn = Dispatch(module)
