"""Programs, their regions and their calls: what a transformed trace runs.

Of the runtime, only this module knows Thunder: it turns the ops of a region into a Python function.

Note [Four ways through a call]
    ``WARMUP``   a layout's first call: everything runs eagerly, regions with their memory in the arena.
    ``CAPTURE``  its second call: each region is recorded, which executes nothing, and then replayed.
    ``REPLAY``   every later call for which the recording's guard holds.
    ``EAGER``    whatever cannot be one of these, with the reason counted: regions run their ops, nothing is kept.

Note [Who owns a recording's memory]
    In warm-ups and captures, the trace's variables hold addresses in the arena and the call owns the memory, so that it
    can give each value up the moment the last region that needs it begins, and the memory is reused as in an eager
    call. Afterwards nobody owns it: the recording keeps addresses. What a forward saved for a backward that has not
    been captured yet must not be reused before it has: the recording owns it until then.
"""

from __future__ import annotations

import enum
import linecache
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import AnyProxy, CollectionProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import del_last_used
from thunder.executors.pythonex import clear_mutable_collection
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from thunder_cg.analysis.boundary import Boundary
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.partition import Plan, Region
from thunder_cg.errors import CaptureError, DisagreementWarning, ReplayRefused
from thunder_cg.options import Options
from thunder_cg.runtime.arena import Arena, Arenas
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.code import Code
from thunder_cg.runtime.recording import (
    Guard,
    Outputs,
    Part,
    Recording,
    RegionGraph,
    Sharing,
    Source,
    address,
    layout,
    overlaps_itself,
    place,
    settings,
)
from thunder_cg.runtime.verify import Check, Disagreement, fingerprints, verified

_MAX_LAYOUTS = 1024  # warmed up and remembered; past it, all are warmed up again
_MAX_MOVES = 3  # how often a parameter may move before it is copied like any other input
_MAX_TRIES = 3  # captures of a region that may fail for a reason that can pass, such as too little memory

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_HOOKED = "saved-tensor hooks are active (activation checkpointing, offloading), and they own what a forward saves"
_WATCHED = (
    "a torch dispatch or function mode is active, which has to see every operator, and would see none in a replay"
)
_DUAL = "forward-mode AD is active, and a graph computes no tangents"
_LEAF = "an input that is written in place is a leaf that requires grad, which PyTorch does not allow"
_RETAINED = "the autograd graph is retained, so what its forward saved has to outlive this backward"


class Mode(enum.Enum):
    """See Note [Four ways through a call]."""

    WARMUP = "warm-up"
    CAPTURE = "capture"
    REPLAY = "replay"
    EAGER = "eager"


class Call:
    """One call of a trace pair: the arena that it holds and how its regions run."""

    __slots__ = ("__weakref__", "arena", "key", "mode", "number", "owned", "part", "recording", "verifies")

    def __init__(self) -> None:
        self.mode = Mode.EAGER
        self.verifies = False  # whether replays are compared with eager runs
        self.arena: Arena | None = None  # that it holds
        self.recording: Recording | None = None
        self.part: Part | None = None
        self.key: Any = None  # the layout that a warm-up is for
        self.number = 0  # among the program's calls
        self.owned: dict[str, torch.Tensor] = {}  # Note [Who owns a recording's memory]

    @classmethod
    def replaying(cls, recording: Recording, kind: str) -> Call:
        """A call that replays ``recording``, whose arena the caller has taken."""
        call = cls()
        call.arena, call.recording, call.part = recording.arena, recording, recording.parts[kind]
        call.mode = Mode.REPLAY
        return call

    def release(self) -> None:
        """Gives the arena back. Nothing in its memory may be used any more."""
        arena, self.arena = self.arena, None
        self.owned = {}
        if arena is not None:
            arena.release()

    def owns(self, name: str, tensor: Any) -> bool:
        """Whether ``tensor`` is the arena's value of that name. One that a saved-tensor hook replaced is not."""
        owned = self.owned.get(name)
        return owned is not None and isinstance(tensor, torch.Tensor) and owned.data_ptr() == tensor.data_ptr()

    def __del__(self) -> None:
        self.release()


class Others(tuple):
    """The non-tensors that a forward saves for its backward, and the call that holds their arena."""

    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """One result of a region's symbol: an exit, inside or as the copy that leaves."""

    name: str
    leaves: bool


@dataclass(slots=True)
class Stats:
    """Counts of one region. Bytes are those of the last recording, per call."""

    captures: int = 0
    replays: int = 0
    eager_runs: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    verified: int = 0


class RuntimeRegion:
    """One region of a program: its function, and its part in every recording.

    Args:
        watched: for `verify`: the same ops, but returns the fingerprints of their values, in order.
    """

    def __init__(
        self,
        name: str,
        region: Region,
        boundary: Boundary,
        function: Callable[..., Sequence[Any]],
        watched: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.name = name
        self.region = region
        self.boundary = boundary
        self.device = torch.device(region.device)
        self.slots = tuple(
            Slot(exit.name, leaves)
            for exit in boundary.exits
            for leaves in (False, True)
            if (exit.leaves if leaves else exit.inside)
        )
        self.stats = Stats()
        self.failure: str | None = None  # of its last capture
        self.tries = _MAX_TRIES  # how many captures may still fail; none: it runs eagerly from then on
        self.in_arena: list[int] = []  # inputs in an arena that results may be views of
        leaving = {slot.name for slot in self.slots if slot.leaves}
        self.twice = [i for i, slot in enumerate(self.slots) if not slot.leaves and slot.name in leaving]
        self.disagreement: Disagreement | None = None  # of its graph with its ops: it is quarantined
        self.remark: str | None = None  # what verification found besides
        self.function = function
        self.watched = watched

    @property
    def written(self) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self.boundary.inputs) if name in self.boundary.written)


class Program:
    """What the transform made of one trace: its plan, its regions, and what was recorded of them."""

    def __init__(
        self,
        *,
        kind: str,
        ops: Ops,
        plan: Plan,
        regions: Sequence[RuntimeRegion],
        saved: frozenset[str],
        options: Options,
        backend: Backend,
        arenas: Arenas,
        forward: Program | None,
    ) -> None:
        self.kind = kind
        self.ops = ops
        self.plan = plan
        self.regions = list(regions)
        self.options = options
        self.calls = 0
        self.eager_calls = 0
        self.shortcuts = 0  # calls that went around Thunder's dispatch
        self.no_shortcut: str | None = None  # why none can
        self.samples = isinstance(options.verify, int)
        self.verify_after = 0 if self.samples else sys.maxsize  # so many calls; then the next replay is verified
        self._is_quarantined = False
        self.fallbacks: Counter[str] = Counter()
        self._saved = saved
        self._backend = backend
        self._arenas = arenas
        self._pair = forward if forward is not None else self  # the program that owns the pair's recordings
        self._recordings: list[Recording] = []  # newest first
        self._used: list[Arena] = []  # kept alive from the warm-up on
        self._waiting: weakref.WeakSet[Call] = weakref.WeakSet()  # whose backward is still to come
        self._steady = 0  # such calls since the last that was neither recorded nor replayed
        self._warm: set[Any] = set()
        self._moves: Counter[int] = Counter()
        self._retired = 0
        outside = set(ops.args)
        self.inputs = tuple(dict.fromkeys(n for r in regions for n in r.boundary.inputs if n in outside))
        position = {name: i for i, name in enumerate(self.inputs)}
        self._position = position
        self._static = [ops.values[name].static for name in self.inputs]
        self._written = frozenset(position[n] for r in regions for n in r.boundary.written if n in position)
        made = {s.name for r in forward.regions for s in r.slots if not s.leaves} if forward is not None else set()
        self._keyed = [i for i, name in enumerate(self.inputs) if name not in made]  # the rest follows from the forward
        for region in self.regions:
            names = region.boundary.inputs
            region.in_arena = [i for i, n in enumerate(names) if n in made and n in region.boundary.shared]
            made |= {s.name for s in region.slots if not s.leaves}
        self._no_leaves = any(map(_writes_with_grad, ops.ops))

    # How a call begins

    def begin(self, *tensors: torch.Tensor) -> Call:
        """Begins a call: finds a recording whose guard holds for ``tensors``, or decides what to do without one."""
        call = Call()
        self.calls += 1
        inputs = list(tensors)
        obstacle = self.obstacle()
        if obstacle is not None:
            return self._eager(call, obstacle, strict=False)
        for recording in self._recordings:
            if recording.parts[self.kind].guard.holds(inputs) and recording.arena.try_hold():
                call = Call.replaying(recording, self.kind)
                recording.arena.enter()
                call.verifies = self._is_due()
                return call
        return self._begin_without_recording(call, inputs)

    def _is_due(self) -> bool:
        """Whether to verify the call that has just been counted."""
        if self.calls <= self.verify_after:
            return False
        self._count_sample()
        return True

    def _count_sample(self) -> None:
        if isinstance(self.options.verify, int):
            self.verify_after = self.calls + self.options.verify - 1

    def obstacle(self) -> str | None:
        """Why no call on this thread can replay a graph now."""
        if self._backend.busy():
            return "inside another capture"
        if _is_watched():
            return _WATCHED
        if self._saved and _saved_tensors_are_hooked():
            return _HOOKED
        if forward_ad._current_level >= 0:
            return _DUAL
        return None

    def detour(self) -> str | None:
        """Why the next call on this thread must not go around Thunder's dispatch, of a program that samples calls."""
        return "it is verified" if self.calls >= self.verify_after else self.obstacle()

    def conditions(self, code: Code) -> list[str]:
        """That there is no `obstacle`, nor a `detour` to make, as expressions."""
        found = [
            f"not {code.name(self._backend.busy, 'busy')}()",
            f"{code.name(_dispatch_modes, 'dispatch_modes')}() == 0",
            f"{code.name(forward_ad, 'forward_ad')}._current_level < 0",
            f"({code.name(_function_modes, 'function_modes')}() == 0 or not {code.name(_is_watched, 'is_watched')}())",
        ]
        if self.samples:
            ran = code.name(self, "program")
            found.append(f"{ran}.calls < {ran}.verify_after")
        if self._saved:
            found.append(f"{code.name(_saved_tensors_hooks, 'saved_tensors_hooks')}(False) is None")
        return found

    def may_replay_backward(self) -> bool:
        """Whether the backward under way may replay a graph, and need not leave what its forward saved."""
        return not (graph_is_retained() or _is_watched())

    def may_replay_backward_unverified(self) -> bool:
        """The same for a program with `verify`, whose graphs may be quarantined, or due."""
        return not self._is_quarantined and self.calls < self.verify_after and self.may_replay_backward()

    def is_alone(self, arena: Arena) -> bool:
        """Whether no call but the one that holds ``arena`` awaits its backward, or runs."""
        pair = self._pair
        return not pair._waiting and not any(other is not arena and other.is_held() for other in pair._used)

    @property
    def is_steady(self) -> bool:
        """Whether calls that are in flight together are all replays by now, as far as the last calls tell."""
        most = len(self._used)
        return most <= 1 or (
            self._steady >= most and not any(self.calls - call.number < most for call in self._waiting)
        )

    @property
    def recordings(self) -> list[Recording]:
        """What later calls may replay, newest first."""
        return self._recordings

    @property
    def is_one_region(self) -> bool:
        """Whether the whole trace is one region."""
        return len(self.regions) == 1 and all(
            isinstance(step, Region) or self.ops.ops[step.op].structure for step in self.plan.steps
        )

    def _begin_without_recording(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        problem = self._unfit(inputs)
        if problem:
            return self._eager(call, problem)
        arena = self._arenas.hold(self._used)
        if arena is None:
            limit = self.options.max_arenas
            return self._eager(call, f"all arenas are held by calls in flight (max_arenas={limit}); raise max_arenas")
        if arena not in self._used:
            self._used.append(arena)
        call.arena = arena
        arena.enter()
        return self._warm_up_or_capture(call, inputs)

    def _warm_up_or_capture(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        key = self._key(inputs)
        if key not in self._warm:
            call.mode, call.key = Mode.WARMUP, key
            self.eager_calls += 1
            return call
        self._count_moves(inputs)
        assert call.arena is not None
        if call.recording is None:
            call.recording = Recording(call.arena)
        static = [
            i
            for i, (name, tensor) in enumerate(zip(self.inputs, inputs))
            if tensor is not None and (self._is_static(name, call.recording) or call.owns(name, tensor))
        ]
        call.part = Part(Guard(inputs, static, self._written), [None] * len(self.regions))
        call.mode = Mode.CAPTURE
        call.verifies = self.options.verify is not None
        self._count_sample()
        return call

    def resume(self, others: Any, *tensors: torch.Tensor) -> Call:
        """Begins the backward of a call whose forward returned ``others``."""
        call = getattr(others, "call", None)
        if call is None and isinstance(others, list):  # the list of both saved collections, not yet taken apart
            call = next((o.call for o in others if isinstance(o, Others)), None)
        if call is None:
            return self.begin(*tensors)
        self.calls += 1
        self._pair._waiting.discard(call)
        if call.arena is None:
            return self._eager(Call(), "its forward ran eagerly", strict=False)
        call.arena.enter()
        if graph_is_retained():
            return self._eager(Call(), _RETAINED, strict=False)
        if call.mode is Mode.EAGER:
            return self._eager(call, "its forward ran eagerly", strict=False)
        if _is_watched():
            return self._eager(call, _WATCHED, strict=False)
        inputs = list(tensors)
        recording = call.recording
        part = recording.parts.get(self.kind) if recording is not None else None
        if part is not None and part.guard.holds(inputs):
            call.part, call.mode, call.verifies = part, Mode.REPLAY, self._is_due()
            return call
        problem = self._unfit(inputs)
        if problem:
            return self._eager(call, problem)
        if recording is None:
            call.key = self._key(inputs)
            self.eager_calls += 1
            return call
        if part is not None:
            retired = self._retire(recording)
            reason = "the backward's inputs are not laid out as when it was captured"
            return self._eager(call, reason, strict=not retired)
        call.owned = recording.owned
        self._warm_up_or_capture(call, inputs)
        if call.mode is Mode.WARMUP:  # the recording still waits for its backward
            call.owned = dict(recording.owned)
        else:  # it gives its memory up from here on, and is of use again only when it is complete
            self._pair.drop(recording)
        return call

    def _eager(self, call: Call, reason: str, *, strict: bool = True) -> Call:
        self.eager_calls += 1
        self.fallbacks[reason] += 1
        call.mode = Mode.EAGER
        if strict and self.options.strict:
            raise CaptureError(f"{self.kind} call {self.calls}", reason, "mend that (print(explain(fn)) has the plan)")
        return call

    def _unfit(self, inputs: Sequence[Any]) -> str | None:
        """Why no graph can ever be right for these inputs."""
        for name, tensor in zip(self.inputs, inputs):
            if not _is_plain(tensor):
                return f"input {name!r} is a {type(tensor).__name__}, not a plain tensor"
            if tensor is not None and (tensor.layout is not torch.strided or tensor._is_zerotensor()):
                return f"input {name!r} is a {tensor.layout} tensor without memory of its own"
        if self._written:
            static = {i for i, is_static in enumerate(self._static) if is_static}
            if not Sharing.of(inputs, static, self._written).admits(inputs):
                names = ", ".join(repr(self.inputs[i]) for i in sorted(self._written)[:3])
                return f"an input that is written in place ({names}) shares memory with another; pass separate tensors"
            if self._no_leaves and any(map(_is_graded_leaf, map(inputs.__getitem__, self._written))):
                return _LEAF
        return None

    def _key(self, inputs: Sequence[torch.Tensor]) -> Any:
        return (settings(), tuple(layout(inputs[i]) for i in self._keyed))

    def _count_moves(self, inputs: Sequence[torch.Tensor]) -> None:
        for recording in self._recordings[:1]:
            self._moves.update(recording.parts[self.kind].guard.moved(inputs))

    # How it ends

    def end(self, call: Call, *others: Any) -> Others:
        """Ends a forward that awaits its backward: the arena is held until that ran or can no longer come."""
        self._seal(call)
        self._steady = self._steady + 1 if call.mode in (Mode.CAPTURE, Mode.REPLAY) else 0
        call.number = self.calls
        self._waiting.add(call)
        result = Others(others)
        result.call = call
        return result

    def finish(self, call: Call) -> None:
        """Ends a call."""
        self._seal(call)
        call.release()

    def _seal(self, call: Call) -> None:
        """What was warmed up or recorded is complete from here on."""
        if call.mode is Mode.WARMUP:
            if len(self._warm) >= _MAX_LAYOUTS:
                self._warm.clear()
            self._warm.add(call.key)
        elif call.mode is Mode.CAPTURE:
            recording, part = call.recording, call.part
            assert recording is not None and part is not None
            recording.parts[self.kind] = part
            if not recording.incomplete:
                self._pair.admit(recording)
            if self._pair is self:
                recording.owned = {name: t for name, t in call.owned.items() if name in self._saved}
            else:
                recording.owned.clear()

    def admit(self, recording: Recording) -> None:
        """Keeps a recording for later calls; past the bound, the arena's oldest goes."""
        same_arena = [r for r in self._recordings if r.arena is recording.arena]
        for old in same_arena[self.options.max_recordings - 1 :]:
            self.drop(old)
        recording.dropped = False
        self._recordings = [recording, *self._recordings]

    def drop(self, recording: Recording) -> None:
        """No later call replays the recording."""
        recording.dropped = True
        self._recordings = [r for r in self._recordings if r is not recording]

    def _retire(self, recording: Recording) -> bool:
        """Drops a recording that did not fit to the end of a call, so that the next call makes one that does.

        Not for ever: returns whether it did.
        """
        pair = self._pair
        if pair._retired >= self.options.max_recordings:
            return False
        pair._retired += 1
        pair.drop(recording)
        return True

    # A region's turn

    def region_caller(self, index: int) -> Callable[..., Sequence[Any]]:
        """The function behind the symbol of region ``index``: takes the call and the region's inputs."""
        region = self.regions[index]

        def run(call: Call, *args: Any) -> Sequence[Any]:
            if call.mode is Mode.REPLAY:
                graph = call.part.graphs[index]  # type: ignore[union-attr]
                if graph is not None and region.disagreement is not None:  # while the call was in flight
                    self._eager(call, f"{region.name} is quarantined", strict=False)
                elif graph is not None:
                    if graph.admits(args):
                        try:
                            results = self._verify(call, index, graph, args) if call.verifies else graph.replay(args)
                            region.stats.replays += 1
                            return results
                        except ReplayRefused as error:
                            self._eager(call, f"{region.name} could not be replayed: {_sentence(error)}")
                    else:
                        self._miss(call, region)
            elif self._no_leaves and any(_is_graded_leaf(args[i]) for i in region.written):
                self._eager(call, _LEAF, strict=False)  # which raises, where a detached leaf would be written
            elif call.mode is Mode.CAPTURE:
                if region.tries:
                    return self._capture(call, index, args)
                self._forbid_eager(region)
            elif call.mode is Mode.WARMUP and region.tries:
                return self._warm_up(call, region, args)
            return self._run(region, args)

        run.__name__ = region.name
        return run

    def _verify(self, call: Call, index: int, graph: RegionGraph, args: Sequence[Any]) -> Sequence[Any]:
        """A replay that is compared with an eager run, which wins."""
        region = self.regions[index]
        outcome = verified(region, graph, graph.check, args, self.ops, self._backend)
        region.stats.verified += outcome.compared
        region.remark = outcome.remark or region.remark
        if not self.samples:
            graph.check = None
        results = outcome.results
        if outcome.disagreement is not None:
            self._quarantine(call, index, outcome.disagreement)
        if results is None:
            results = self._run(region, args)
        if (found := outcome.disagreement) is not None:  # last, since a filter may make an error of the warning
            self._forbid_eager(region)
            message = f"{region.name} is eager from now on: {found.problem}; {found.fix}"
            warnings.warn(message, DisagreementWarning, stacklevel=2)
        return results

    def _quarantine(self, call: Call, index: int, disagreement: Disagreement) -> None:
        """No recording that holds the region's graph is replayed any more, and no other is made of it."""
        region, pair = self.regions[index], self._pair
        region.disagreement, region.tries = disagreement, 0
        region.failure = f"{disagreement.problem}; {disagreement.fix}"
        for recording in pair.recordings:
            part = recording.parts.get(self.kind)
            if part is not None and part.graphs[index] is not None:
                pair.drop(recording)
        self._is_quarantined = True
        self._eager(call, f"{region.name} disagrees with its ops", strict=False)

    def _miss(self, call: Call, region: RuntimeRegion) -> None:
        assert call.recording is not None
        retired = self._retire(call.recording)
        reason = f"{region.name}: what an eager operator made is not laid out as when it was captured"
        self._eager(call, reason, strict=not retired)

    def _forbid_eager(self, region: RuntimeRegion) -> None:
        """Raises with ``strict=True``, because the region could not be captured, or was and is quarantined."""
        if self.options.strict and region.disagreement is not None:
            raise CaptureError(region.name, region.disagreement.problem, region.disagreement.fix)
        if self.options.strict:
            raise CaptureError(region.name, str(region.failure), "deny the operator with deny=[...]")

    def _run(self, region: RuntimeRegion, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the region's ops eagerly. What leaves is no view of the arena's memory."""
        region.stats.eager_runs += 1
        results = list(region.function(list(args)))
        for i in region.twice:  # what leaves becomes a part of autograd's graph, and what stays does not
            results[i] = results[i].detach()
        if held := {_memory(args[i]) for i in region.in_arena} - {0}:
            leaves = [slot.leaves and _memory(result) in held for slot, result in zip(region.slots, results)]
            if any(leaves):
                outputs = Outputs(results.copy(), (), leaves, region.device, torch.Tensor.detach)
                outputs.deliver_owned(results, args)
        return results

    def _warm_up(self, call: Call, region: RuntimeRegion, args: Sequence[Any]) -> Sequence[Any]:
        try:
            return self._run_in_arena(call, region, args)
        except _NotRun as failed:
            self._fail(region, failed.error)
        self._forbid_eager(region)
        self.fallbacks[f"{region.name} could not be warmed up: {region.failure}"] += 1
        call.mode = Mode.EAGER
        return self._run(region, args)

    def _run_in_arena(self, call: Call, region: RuntimeRegion, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the region's ops with their memory in the arena, and copies what leaves.

        Where memory runs out, the allocator's cache has been emptied, and the ops may be run again if they have not
        written to what was there before, nor given up memory that they read.

        Raises:
            _NotRun: nothing of it ran.
        """
        assert call.arena is not None
        began = False

        def function(inputs: list[Any]) -> Sequence[Any]:
            nonlocal began
            began = True
            return region.function(inputs)

        may_rerun = not region.boundary.written and region.boundary.alive.issuperset(call.owned)
        while True:
            try:
                pool = call.arena.pool(region.device)
                inside = self._inside(call, region, args)
                taken = self._take(call, region, args, inside)
                sources = _sources(region, taken, inside)
                produced = list(pool.warm_up(function, [taken]))
                break
            except Exception as error:
                if not began:
                    raise _NotRun(error) from error
                if not (may_rerun and isinstance(error, torch.OutOfMemoryError)):
                    raise
                may_rerun = False
        region.stats.eager_runs += 1
        outputs = Outputs(produced, sources, [slot.leaves for slot in region.slots], region.device, pool.alias)
        results: list[Any] = [None] * len(produced)
        outputs.deliver_owned(results, args)
        for i in outputs.fixed:
            results[i] = produced[i]
            if call.mode is Mode.WARMUP:
                call.owned[region.slots[i].name] = produced[i]
                results[i] = pool.alias(produced[i])
        return results

    def _inside(self, call: Call, region: RuntimeRegion, args: Sequence[Any]) -> frozenset[int]:
        """The arguments that are in the arena."""
        return frozenset(i for i, name in enumerate(region.boundary.inputs) if call.owns(name, args[i]))

    def _take(self, call: Call, region: RuntimeRegion, args: Sequence[Any], inside: frozenset[int]) -> list[Any]:
        """The region's arguments, each the only owner of its memory if nothing after the region needs it.

        Warm-ups and captures see plain tensors where calls have parameters: a fusion that torch.compile guards by the
        type of its inputs would otherwise be compiled again in the middle of a capture.
        """
        names, alive = region.boundary.inputs, region.boundary.alive
        taken = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        for i in inside:
            taken[i] = call.owned[names[i]]
        for name in [n for n in call.owned if n not in alive]:
            del call.owned[name]
        return taken

    def _capture(self, call: Call, index: int, args: Sequence[Any]) -> Sequence[Any]:
        region, recording = self.regions[index], call.recording
        assert recording is not None
        inside, before = self._inside(call, region, args), (region.failure, region.tries)
        try:
            return self._record(call, index, args)
        except _Executed as error:
            raise error.__cause__ from None  # type: ignore[misc]
        except Exception as error:
            self._fail(region, error)
        self._forbid_eager(region)
        self.fallbacks[f"{region.name} could not be captured: {region.failure}"] += 1
        recording.incomplete |= region.tries > 0
        try:
            # In the arena the memory of the warm-up is at hand, unless the capture has given up what the ops read.
            if inside == self._inside(call, region, args):
                with suppress(_NotRun):
                    return self._run_in_arena(call, region, args)
            return self._run(region, args)
        except Exception:
            region.failure, region.tries = before  # the operator itself raises: it may do better next time
            raise

    def _fail(self, region: RuntimeRegion, error: Exception) -> None:
        """Keeps the reason, and whether to try again: what fails in an operator fails again, but for want of memory."""
        op = _failing_op(error, region, self.ops.ops)
        place = f"{op.name} at {self.ops.line(op) or 'an unknown line'}: " if op is not None else ""
        text = place + _sentence(error)
        region.tries = region.tries - 1 if op is None or _is_out_of_memory(error) else 0
        again = f" (the next call tries again; {region.tries} of {_MAX_TRIES} tries left)"
        region.failure = text + (again if region.tries else "")

    def _record(self, call: Call, index: int, args: Sequence[Any]) -> Sequence[Any]:
        region, recording = self.regions[index], call.recording
        assert call.arena is not None and recording is not None and call.part is not None
        pool = call.arena.pool(region.device)
        names = region.boundary.inputs
        inside = self._inside(call, region, args)
        static = inside | frozenset(
            i for i, name in enumerate(names) if args[i] is not None and self._is_static(name, recording)
        )
        written = region.written
        _check_inputs(names, args, static, written)

        leaves = [slot.leaves for slot in region.slots]
        check = Check.record(region, pool, args, static, inside) if call.verifies else None
        buffers: list[Any] = [None] * len(args)
        loads = place(pool, args, static, buffers)
        entry = RegionGraph(loads, written)
        entry.check = check
        entry.load(args)
        taken = self._take(call, region, args, inside)
        captured = [arg if buffer is None else buffer for arg, buffer in zip(taken, buffers)]
        del taken, buffers
        sources = _sources(region, captured, inside)
        # A result must not get the address of an input that it could be taken for a view of (the sources are kept), and
        # what is read back after a replay must not have been reused on the way.
        kept = [captured[i] for i in written]
        versions = {i: (t, t._version) for i in written - inside if not (t := captured[i]).is_inference()}
        produced: list[Any] = []

        def leaving(made: Sequence[Any]) -> list[torch.Tensor]:
            produced.extend(made)
            entry.outputs = Outputs(produced, sources, leaves, region.device, pool.alias)
            return entry.outputs.sources()

        try:
            entry.graph, _ = pool.capture(region.function, [captured], entry.targets, leaving)
        finally:
            if captured:  # the function, which empties the list, was not called
                call.owned.update((names[i], captured[i]) for i in inside)
        del _
        outputs = entry.outputs
        outputs.disown()
        entry.touched = frozenset(i for i, (t, version) in versions.items() if t._version != version)
        del kept, versions
        sources.clear()
        entry.guarded, entry.guard = self._late_guard(names, args, inside, static, written)
        entry.fixed = [pool.alias(p) if i in outputs.fixed else None for i, p in enumerate(produced)]
        try:
            results = self._verify(call, index, entry, args) if call.verifies else entry.replay(args)
        except ReplayRefused:
            raise
        except Exception as error:
            raise _Executed from error
        self._note(call, region, entry, produced, static)
        call.part.graphs[index] = entry
        return results

    def _is_static(self, name: str, recording: Recording) -> bool:
        position = self._position.get(name)
        if name in recording.static:
            return True
        return position is not None and self._static[position] and self._moves[position] < _MAX_MOVES

    def _late_guard(
        self,
        names: Sequence[str],
        args: Sequence[Any],
        inside: frozenset[int],
        static: frozenset[int],
        written: frozenset[int],
    ) -> tuple[tuple[int, ...], Guard | None]:
        """The check of what was not there when the call began, because an eager operator makes it."""
        late = [i for i, name in enumerate(names) if name not in self._position and i not in inside]
        if late and written:
            late = [i for i in range(len(names)) if i not in inside]
        if not late:
            return (), None
        place = {i: p for p, i in enumerate(late)}
        guard = Guard(
            [args[i] for i in late],
            [place[i] for i in late if i in static],
            frozenset(place[i] for i in written if i in place),
        )
        return tuple(late), guard

    def _note(
        self, call: Call, region: RuntimeRegion, entry: RegionGraph, produced: Sequence[Any], static: frozenset[int]
    ) -> None:
        """Writes down what the next regions of the recording, and the report, have to know of this one."""
        recording = call.recording
        assert recording is not None
        for i in entry.outputs.fixed:
            call.owned[region.slots[i].name] = produced[i]
        for i, source in entry.outputs.view_sources().items():
            if source in static:
                recording.static.add(region.slots[i].name)
        if region.disagreement is None:
            region.failure = None
        stats = region.stats
        stats.captures += 1
        stats.replays += 1
        stats.bytes_in, stats.bytes_out = entry.nbytes_in, entry.outputs.nbytes

    def arena_bytes(self) -> int:
        """Bytes of the arenas that hold the program's recordings. Arenas are shared between programs."""
        return sum(arena.nbytes() for arena in self._pair._used)


def _sources(region: RuntimeRegion, taken: Sequence[Any], inside: frozenset[int]) -> list[Source]:
    """The arguments outside of the arena that results may be views of."""
    names, shared = region.boundary.inputs, region.boundary.shared
    return [
        Source.of(i, tensor)
        for i, tensor in enumerate(taken)
        if isinstance(tensor, torch.Tensor) and names[i] in shared and i not in inside
    ]


class _Executed(Exception):
    """A graph failed after it may have run: running its ops again could do their effects twice."""


class _NotRun(Exception):
    """A warm-up failed before the first op."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def keep(*tensors: Any) -> list[Any]:
    """Copies that outlive the arena."""
    kept: list[Any] = []
    for tensor in tensors:
        results = [None]
        device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
        Outputs([tensor], (), [True], device, torch.Tensor.detach).deliver_owned(results, ())
        kept += results
    return kept


def _memory(value: Any) -> int:
    """Where the memory of a plain tensor begins; 0 for anything else."""
    has_memory = isinstance(value, torch.Tensor) and _is_plain(value) and value.layout is torch.strided
    return address(value) if has_memory else 0


def _is_plain(tensor: Any) -> bool:
    """Whether a graph can have this as an input; operators return None for a tensor that they do without."""
    return tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _check_inputs(names: Sequence[str], args: Sequence[Any], static: frozenset[int], written: frozenset[int]) -> None:
    for i, (name, arg) in enumerate(zip(names, args)):
        if not _is_plain(arg):
            raise TypeError(f"input {name!r} is a {type(arg).__name__}, not a plain tensor")
        if i in written and i not in static and overlaps_itself(arg):
            raise ValueError(f"input {name!r} is written in place and overlaps itself")
    if written and not Sharing.of(args, set(static), written).admits(args):
        raise ValueError("an input that is written in place shares memory with another")


def _sentence(error: BaseException) -> str:
    """The error's type and the first sentence of its message; the rest may differ from time to time."""
    if isinstance(error, ReplayRefused):
        error = error.__cause__ or error
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {text or 'no message'}"


def _failing_op(error: BaseException, region: RuntimeRegion, ops: Sequence[Op]) -> Op | None:
    """The op of the region that raised the error, if it was one of them."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code in (region.function.__code__, getattr(region.watched, "__code__", None)):
            line = linecache.getline(code.co_filename, traceback.tb_lineno)
            made = set(re.findall(r"\w+", line.partition("=")[0]))
            return next((ops[i] for i in region.region.ops if made.intersection(ops[i].outputs)), None)
        traceback = traceback.tb_next
    return None


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or what caused it, says so. Drivers have no class for it."""
    if error is None:
        return False
    said = "out of memory" in str(error).lower().replace("_", " ")
    return said or isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error.__cause__)


def _is_watched() -> bool:
    """Whether a mode of the user's, such as a counter of operations, is active. A default device is none of them."""
    return _dispatch_modes() > 0 or (
        _function_modes() > 0
        and not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )


def _is_graded_leaf(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_leaf and tensor.requires_grad


def _writes_with_grad(op: Op) -> bool:
    """Whether it writes in place while gradients are recorded, which a leaf that requires grad does not admit."""
    copies = op.id == "copy_" and bool(op.symbol.kwargs.get("grad_enabled"))
    return copies or any(map(_writes_with_grad, op.subs))


def _saved_tensors_are_hooked() -> bool:
    """Whether tensors saved now go to hooks, which may keep them for longer than the graph that saved them lives."""
    return _saved_tensors_hooks(False) is not None


def graph_is_retained() -> bool:
    """Whether the backward under way leaves its graph, and what that saved, for another one."""
    return torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph()


def region_function(
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], results: Sequence[Proxy], backend: Backend
) -> Callable[[list[Any]], Sequence[Any]]:
    """A region's Python function, as Thunder writes it: its symbols, each variable deleted after its last use.

    It takes its inputs in a list, which it empties, so that their memory can be freed on the way.
    """
    return _function(name, [_called_by(backend, symbol) for symbol in symbols], inputs, results)


def watched_function(
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], device: torch.device, backend: Backend
) -> Callable[[list[Any]], Sequence[Any]]:
    """Like `region_function`, but it returns the fingerprints of what each symbol made."""
    names = {p.name for s in symbols for p in (*s.flat_proxy_args, *s.flat_proxy_outs)} | {p.name for p in inputs}
    prefix = next(f"print{'_' * n}" for n in count() if not any(name.startswith(f"print{'_' * n}") for name in names))
    take = Symbol("cudagraph_fingerprints", meta=None, is_fusion=True)
    watched, taken = [], []
    with tracectx(TraceCtx()):
        for i, symbol in enumerate(symbols):
            made = [proxy for proxy in symbol.flat_proxy_outs if isinstance(proxy, TensorProxy)]
            taken.append(AnyProxy(None, name=f"{prefix}{i}"))
            context = {take.name: partial(fingerprints, device)}
            watched += [_called_by(backend, symbol), BoundSymbol(take, tuple(made), {}, taken[-1], _call_ctx=context)]
    return _function(f"{name}_watched", watched, inputs, taken)


def _function(
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], results: Sequence[Proxy]
) -> Callable[[list[Any]], Sequence[Any]]:
    def region_fn(inputs: Any) -> None:
        """Stands for the signature alone."""

    region_fn.__name__ = name
    trace = TraceCtx(region_fn)
    with tracectx(trace):
        collection = CollectionProxy(list(inputs), name="inputs")
        trace.args = (collection.collection(),)
        prims.unpack_trivial(collection, name="inputs")
        prims.unpack_sequence(collection, len(inputs))
        trace.bound_symbols.append(clear_mutable_collection.bind(collection, output=None))
        trace.bound_symbols += symbols
        prims.python_return(tuple(results))
    return del_last_used(trace).python_callable(include_decorators=False)


def _called_by(backend: Backend, symbol: Any) -> Any:
    """The symbol, calling its compiled fusion the way the backend needs."""
    if not (symbol.sym.is_fusion and symbol._call_ctx):
        return symbol
    fusion = symbol.from_bsym()
    fusion._call_ctx = {name: backend.fusion(fn) for name, fn in symbol._call_ctx.items()}
    return fusion
