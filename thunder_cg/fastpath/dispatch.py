"""Which calls of a compiled module take which fast path: the module's forward as seen from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch

from thunder_cg.analysis.compile_errors import to_try
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compiled import (
    ModelParts,
    compile_data,
    compile_stats,
    dispatch_of,
    drop_self_references,
    module_parameters,
    original_module,
    set_dispatch,
)
from thunder_cg.compat.settings import (
    dispatch_mode_count,
    function_mode_count,
    functorch_is_active,
    is_below_autograd,
    is_traced,
)
from thunder_cg.compat.thunder import CacheEntry, ThunderModule, current_trace
from thunder_cg.fastpath.accumulate import nodes_of
from thunder_cg.fastpath.compiled import Compiled, MetadataGuard
from thunder_cg.fastpath.guard import PrologueGuard
from thunder_cg.fastpath.inference import FastPath, inference_fast_path, note_last
from thunder_cg.fastpath.late import watch
from thunder_cg.fastpath.prologue import PrologueChecks
from thunder_cg.fastpath.state import MISS, GuardMismatch, ParameterCache, Unsupported, refuse_fully_sharded
from thunder_cg.fastpath.training import TrainingFastPath
from thunder_cg.fastpath.undefined import connect
from thunder_cg.runtime.failures import note
from thunder_cg.runtime.program import Program, program_of
from thunder_cg.runtime.recording import Recording

_OVERTAKEN = "Thunder asks another compiled version first, which may be for the same calls"
_MAX_TRACED = 8  # per cache entry, for traces of several regions: one for each layout of inputs


class TracedFastPath:
    """The fast path for any trace: the prologue's guard, then the computation as Thunder would run it."""

    def __init__(self, compiled: Compiled, guard: PrologueGuard, values: list[Any]) -> None:
        self._entry = compiled.entry
        self._options = compiled.options
        self._pick_inputs, self._pick_passed_on = guard.picker(guard.inputs), guard.picker(guard.passed_on)
        self._tensors = MetadataGuard(guard, list(guard.metadata), values)

    def __call__(self, values: list[Any]) -> Any:
        if not self._tensors.holds(values):
            return MISS
        entry = self._entry
        result = entry.computation_fn(*self._pick_inputs(values))
        if entry.backward_fn:
            data, (saved_tensors, saved_other) = result
            arguments = {
                "backward_fn": entry.backward_fn,
                "flat_args": data["flat_args"],
                "flat_output": data["flat_output"],
                "saved_tensors": saved_tensors,
                "saved_other": saved_other,
                "return_none_instead_of_grads": entry.return_none_instead_of_grads,
                "disable_split_autograd": self._options.get("thunderfx_disable_split_autograd", False),
                "is_differentiable_outputs": self._options.get("is_differentiable_outputs"),
            }
            connect(entry, arguments)
            result = data["output"]
        return entry.epilogue_fn(*self._pick_passed_on(values), *result)


class EntryFastPaths:
    """One cache entry of Thunder's, and the fast paths that it has: none before it was prepared."""

    compiled: Compiled
    _guard: PrologueGuard

    def __init__(self, entry: CacheEntry, statistics: Any) -> None:
        self.entry = entry
        self.is_prepared = self.is_unsupported = False
        self._statistics = statistics
        self._recorded: list[tuple[Recording, FastPath]] = []  # newest first
        self._traced: list[TracedFastPath] = []
        self.is_one_region = True
        self._excludes: WeakKeyDictionary[EntryFastPaths, bool] = WeakKeyDictionary()  # by older entries

    @cached_property
    def checks(self) -> PrologueChecks:
        return PrologueChecks(self.entry.prologue_traces[-1])

    def excludes(self, older: EntryFastPaths) -> bool:
        """Whether no call is for both."""
        if older not in self._excludes:
            self._excludes[older] = self.checks.excludes(older.checks)
        return self._excludes[older]

    def prepare(self, compiled: Compiled, guard: PrologueGuard) -> None:
        """Once a call was for it."""
        self.compiled, self._guard, self.is_prepared = compiled, guard, True

    def calls(self) -> list[FastPath]:
        """What to call, in this order, until one does not miss."""
        recorded = [path for _, path in self._recorded]
        trains = self.compiled.backward is not None
        in_turn = [*(recorded if trains else ()), *self._traced]
        return [*(() if trains else recorded), *([self._try_in_turn(in_turn)] if in_turn else ())]

    def _try_in_turn(self, paths: Sequence[FastPath]) -> FastPath:
        """Tries the fast paths that start from the values which the prologue's guard looks up."""
        guard, program, entry, statistics = self._guard, self.compiled.forward, self.compiled.entry, self._statistics

        def call(*args: Any, **kwargs: Any) -> Any:
            values = guard.values(args, kwargs)
            if values is None:
                return MISS
            for path in paths:
                try:
                    result = path(values)
                except Exception:
                    statistics.calls += 1
                    raise
                if result is not MISS:
                    program.counts.fast_path_calls += 1
                    statistics.calls += 1
                    statistics.cache_hits += 1
                    if statistics.last_prologue is not entry.prologue_fn:
                        note_last(statistics, entry)
                    return result
            return MISS

        return call

    def drop_discarded(self) -> None:
        """Drops the fast paths to recordings that were dropped."""
        self._recorded = [known for known in self._recorded if not known[0].dropped]

    def drop_caches(self) -> None:
        """No fast path was for a call: drops what is only kept to be fast."""
        for _, path in self._recorded:
            if isinstance(path, TrainingFastPath):
                path.drop_caches()

    def build_fast_paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes fast paths for what has been recorded, after a call that took Thunder's dispatch."""
        pair = self.compiled.forward.pair
        recordings = pair.recordings if pair.selection is None else []  # what is timed is Thunder's dispatch
        self.drop_discarded()
        known_ids = {id(recording) for recording, _ in self._recorded}
        new = [recording for recording in recordings if id(recording) not in known_ids]
        values = self._guard.values(args, kwargs)  # the first time takes long, so not only once there is a recording
        if not recordings or values is None:
            return
        compiled, guard = self.compiled, self._guard
        try:
            for recording in new if self.is_one_region else ():
                with suppress(GuardMismatch):
                    path: FastPath
                    if compiled.backward is not None:
                        path = TrainingFastPath(compiled, guard, recording, values)
                    else:
                        path = inference_fast_path(compiled, guard, recording, values, self._statistics)
                    self._recorded.insert(0, (recording, path))
        except Unsupported as error:
            self.is_one_region = False
            compiled.forward.no_fast_path = str(error)
        if not self.is_one_region:
            self._traced = [TracedFastPath(compiled, guard, values), *self._traced][:_MAX_TRACED]


class Dispatch:
    """Stands in for a compiled module's forward: tries the fast paths, then Thunder's dispatch.

    The module owns it, and it does not own the module: both are freed without the garbage collector.
    """

    def __init__(self, module: ThunderModule) -> None:
        self._module = ref(module)
        self._thunders = dispatch_of(module)
        self._parameters_cache = ParameterCache(module)
        self._entries: dict[int, EntryFastPaths] = {}  # by the identity of Thunder's
        self._calls: list[FastPath] = []  # of all entries
        self._statistics = compile_stats(module)
        self.parts: ModelParts | None = None  # of the model, when Thunder first compiled it
        self._known = 0  # how many cache entries there were

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # it would look into whatever it can
            return _outside_of_dynamo(self, args, kwargs)
        if current_trace() is not None:
            return self._thunders(*args, **kwargs)
        call: FastPath | None
        for call in self._calls if len(self._statistics.interpreter_cache) == self._known else ():
            result = call(*args, **kwargs)
            if result is not MISS:
                return result
        call = None  # its recording may be discarded from here on
        result = self._dispatched(args, kwargs)
        self._build_fast_paths(args, kwargs)
        paths = [calls for entry in self._certain() if (calls := entry.calls())]
        self._calls = [call for calls in paths for call in calls]
        return result

    def _dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that takes Thunder's dispatch, which may compile."""
        if (module := self._module()) is not None:
            refuse_fully_sharded(module)
        for entry in self._entries.values():
            entry.drop_caches()
        nodes = nodes_of(self._leaves())  # held until Thunder's own nodes hold them: see Note [Nodes without hooks]
        failures = self._failures()
        try:
            result = self._thunders(*args, **kwargs)
        except Exception as error:
            if self._failures() == failures and functorch_is_active():
                note(error, to_try("", is_of_dynamo=False, in_functorch=True))
            raise
        del nodes
        if self.parts is None and module is not None:
            self.parts = ModelParts.of(original_module(module))
            watch(module, self.parts.modules)
        return result

    def drop_discarded(self) -> None:
        """Drops the fast paths to recordings that were dropped. The next call takes Thunder's dispatch."""
        self._calls = []
        for entry in [*self._entries.values()]:  # on any thread
            entry.drop_discarded()

    def _failures(self) -> int:
        """How often Thunder has raised while it compiled, as it keeps what it has compiled."""
        return self._statistics.cache_misses - len(self._statistics.interpreter_cache)

    def _leaves(self) -> Iterable[torch.Tensor]:
        """The parameters that Thunder's call may get a gradient for, if calls may get autograd nodes of ours."""
        module = self._module()
        is_watched = dispatch_mode_count() or function_mode_count() or functorch_is_active() or is_traced()
        entries = [each for each in self._entries.values() if each.is_prepared]
        may_train = not entries or any(e.is_one_region and e.compiled.backward is not None for e in entries)
        if module is None or not may_train or is_watched or not torch.is_grad_enabled() or is_below_autograd():
            return ()
        kinds = (torch.nn.Parameter, torch.Tensor)  # others may have nodes of their own kind
        parameters = module_parameters(module).values()
        return [p for p in parameters if type(p) in kinds and p.is_leaf and p.requires_grad]

    def _certain(self) -> list[EntryFastPaths]:
        """The entries that no newer one could come before, newest first, as Thunder tries them."""
        entries = [*map(self._entry_of, reversed(self._statistics.interpreter_cache))]
        self._known = len(entries)
        self._entries = {id(each.entry): each for each in entries}
        found = []
        for i, entry in enumerate(entries):
            if entry.is_prepared:
                if all(newer.excludes(entry) for newer in entries[:i]):
                    found.append(entry)
                else:
                    entry.compiled.forward.no_fast_path = _OVERTAKEN
        return found

    def _entry_of(self, thunders: CacheEntry) -> EntryFastPaths:
        return self._entries.setdefault(id(thunders), EntryFastPaths(thunders, self._statistics))

    def _build_fast_paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives the cache entry that Thunder's dispatch has just used fast paths, if it can have any."""
        statistics = self._statistics
        cache = reversed(statistics.interpreter_cache)
        used = next((entry for entry in cache if entry.prologue_fn is statistics.last_prologue), None)
        if used is None:
            return
        drop_self_references(used)
        entry = self._entry_of(used)
        if entry.is_unsupported:
            return
        forward = program_of(used.computation_traces)
        try:
            if not entry.is_prepared:
                if forward is None or not forward.regions:
                    return
                self._prepare(entry, forward)
            entry.build_fast_paths(args, kwargs)
        except GuardMismatch:
            pass
        except Exception as error:  # whatever it is, there is Thunder's dispatch
            entry.is_unsupported = True
            if forward is not None:
                forward.no_fast_path = str(error) if isinstance(error, Unsupported) else repr(error)

    def _prepare(self, entry: EntryFastPaths, forward: Program) -> None:
        """`Unsupported` if the entry can have no fast paths."""
        module, used = self._module(), entry.entry
        assert module is not None
        if compile_data(module).cache_option is not compat.CACHE_OPTIONS.CONSTANT_VALUES:
            raise Unsupported('it is not compiled with cache="constant values"')
        backward = program_of(used.backward_traces) if used.backward_fn else None
        if used.backward_fn and backward is None:
            raise Unsupported("the backward has no regions")
        compiled = Compiled(used, forward, backward, compile_data(module).compile_options)
        guard = PrologueGuard(module, entry.checks, forward.inputs.names, self._parameters_cache)
        forward.pair.fast_paths_dropper = WeakMethod(self.drop_discarded)
        entry.prepare(compiled, guard)


@torch.compiler.disable
def _outside_of_dynamo(dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return dispatch(*args, **kwargs)


def install(module: ThunderModule) -> None:
    """Gives a module that Thunder has compiled its fast paths, if it has none."""
    if not isinstance(dispatch_of(module), Dispatch):
        set_dispatch(module, Dispatch(module))
        watch(module)
