"""A program, which is what a transformed trace runs: how its calls begin and end, and what was recorded of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops, process_groups
from thunder_cg.analysis.partition import Plan, Region
from thunder_cg.compat.torch import Settings, backward_keeps_graph, has_storage, is_zero_tensor, kernel_settings
from thunder_cg.errors import CaptureError
from thunder_cg.options import Options
from thunder_cg.runtime import skip_reasons
from thunder_cg.runtime.agreement import DESTROYED, Collectives
from thunder_cg.runtime.arena import Arena, Arenas
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.call import Call, Mode, SavedState
from thunder_cg.runtime.compilation import Compilation
from thunder_cg.runtime.guards import Guard, OverlapGuard
from thunder_cg.runtime.recording import Recording, TraceRecording
from thunder_cg.runtime.region import LEAF, RuntimeRegion
from thunder_cg.runtime.tensors import Layout, is_leaf_with_grad, is_plain, layout
from thunder_cg.runtime.verifier import Verifier

_MAX_LAYOUTS = 1024  # warmed up and remembered; past it, all are warmed up again
_MAX_MOVES = 3  # how often a parameter may move before it is copied like any other input
_LASTING = 100  # calls after which a capture has paid for itself, so that a move does not count
_MAX_CAPTURES_FOR_MOVES = 6  # past it, a parameter is copied once it has moved: not all move in the same step

_CYCLES = "arenas were held by outputs in reference cycles, so the garbage collector ran"


class Program:
    """What the transform made of one trace: its plan, its regions, and what was recorded of them.

    Args:
        forward: of a backward, the program of its forward, which owns the recordings of both.
        saved: names of what the trace keeps for its backward.
    """

    def __init__(
        self,
        *,
        kind: str,
        ops: Ops,
        plan: Plan,
        aliasing: Aliasing,
        regions: Sequence[RuntimeRegion],
        saved: frozenset[str],
        options: Options,
        backend: Backend,
        verifier: Verifier,
        arenas: Arenas,
        forward: Program | None,
        compilation: Compilation,
    ) -> None:
        self.kind, self.ops, self.plan, self.regions = kind, ops, plan, list(regions)
        self.aliasing, self.compilation = aliasing, compilation
        self.options, self.backend, self.verifier = options, backend, verifier
        self.calls = self.eager_calls = self.warm_ups = 0
        self.fast_path_calls = 0  # calls that went around Thunder's dispatch
        self.no_fast_path: str | None = None  # why none can
        self.remark: str | None = None  # what the user should know besides
        self.fallbacks: Counter[str] = Counter()
        self.samples = isinstance(options.verify, int)
        self.verify_after = 0 if self.samples else sys.maxsize  # so many calls; then the next replay is verified
        self._is_quarantined = False
        self._warm: dict[Any, None] = {}  # layouts that were warmed up, in their order
        self._captured: set[Any] = set()  # of those that are warm
        self._forward = forward
        self._arenas = arenas
        arenas.join(self._pair)
        # Of a pair, kept by the program that owns it:
        self.recordings: list[Recording] = []  # what later calls may replay, newest first
        self._used: list[Arena] = []  # kept alive from the warm-up on
        self._used_scratch: list[Arena] = []
        self._waiting: weakref.WeakSet[Call] = weakref.WeakSet()  # calls whose backward is still to come
        self._moves: Counter[str] = Counter()  # how often a static input was at another address
        self._captures_for_moves = 0
        self._retired = 0
        self._backward_varies = False  # whether recordings keep what the forward saved, for other backwards
        self._collect_at = 1  # how many calls have to find all arenas held before garbage is collected
        self._found_held = 0
        self._describe_inputs(saved, aliasing)
        # All ranks count the same calls, so those whose collectives are eager count, too.
        groups = process_groups(ops.ops) if options.capture_collectives != "never" else []
        self.collectives: Collectives | None = None
        if groups:
            asks = options.capture_collectives == "auto"
            self.collectives = Collectives(groups, asks=asks, watch=backend.watch_collectives)
            self.collectives.held_by(self._pair)

    def _describe_inputs(self, saved: frozenset[str], aliasing: Aliasing) -> None:
        self._saved = saved
        ops, pair = self.ops, self._pair
        outside = set(ops.args)
        inputs = (each.name for region in self.regions for each in region.io.inputs)
        self.inputs = tuple(dict.fromkeys(name for name in inputs if name in outside))
        self._position = position = {name: i for i, name in enumerate(self.inputs)}
        written = (each.name for region in self.regions for each in region.io.inputs if each.written)
        self.written = frozenset(position[name] for name in written if name in position)
        # What is written is mostly a cache that stays where it is. What only may be written is mostly something else.
        certain = (op.index for region in self.regions for op in region.ops if op.rule is not None or op.subs)
        caches = {memory for index in certain for memory in aliasing.writes[index]}
        self._static = [ops.values[name].static or aliasing.sets.get(name) in caches for name in self.inputs]
        in_pool = {name for region in pair.regions for name in region.stays} if pair is not self else set()
        # What the forward left in the pool follows from the forward's own layout.
        self._keyed = [i for i, name in enumerate(self.inputs) if name not in in_pool]
        self.refuses_leaves = any(map(_writes_with_grad, ops.ops))
        for index, region in enumerate(self.regions):
            region.index, region.describe = index, ops.described
            region.refuses_leaves = self.refuses_leaves
            region.aliased_in_pool = [i for i, n in enumerate(region.io.inputs) if n.aliased and n.name in in_pool]
            in_pool |= region.stays
        # By which kernels of the regions may be chosen.
        self.settings = reduce(or_, (op.settings for region in self.regions for op in region.ops), Settings.NONE)
        self._read_settings = kernel_settings(self.settings)
        # Whether replays write to nothing but the arena and their results, and draw nothing.
        writes = any(each.written for region in self.regions for each in region.io.inputs)
        captured = {op.index for region in self.regions for op in region.ops}
        self.is_invisible = not writes and aliasing.effects.isdisjoint(captured)

    @property
    def _pair(self) -> Program:
        """The program that owns the recordings of forward and backward."""
        return self if self._forward is None else self._forward  # an attribute would be a reference cycle

    # How a call begins

    def begin(self, *tensors: torch.Tensor) -> Call:
        """Begins a call: finds a recording whose guard holds for ``tensors``, or decides what to do without one."""
        return self._agree(self._begin(list(tensors)))

    def _agree(self, call: Call) -> Call:
        """Has the other ranks know of a call that communicates. See Note [Agreement of ranks]."""
        if self.collectives is None:
            return call
        call.round = self.collectives.next_round()
        if call.mode in (Mode.WARMUP, Mode.EAGER):
            call.round.decline("it warms up" if call.mode is Mode.WARMUP else "it runs eagerly")
        return call

    def _begin(self, inputs: list[torch.Tensor]) -> Call:
        self.calls += 1
        if (reason := self.skip_reason()) is not None:
            return Call(self).run_eagerly(reason)
        if self.collectives is not None and not self.collectives.are_alive():
            return Call(self).run_eagerly(DESTROYED)
        for recording in self.recordings:
            assert recording.forward is not None
            if recording.forward.guard.holds(inputs) and recording.arena.try_hold():
                call = Call.replaying(self, recording)
                recording.arena.enter()
                call.verifies = self._is_due()
                return call
        if skip_reasons.is_held_back():
            return Call(self).run_eagerly(skip_reasons.IN_STEP)
        if (reason := self._unsupported(inputs)) is not None:
            return Call(self).run_eagerly(reason)
        call = Call(self)
        call.arena = self._hold_arena()
        if call.arena is None:
            limit = self.options.max_arenas
            problem = f"all arenas are held by calls in flight (max_arenas={limit}); raise max_arenas"
            return call.run_eagerly(problem)
        call.arena.enter()
        return self._warm_up_or_capture(call, inputs)

    def begin_backward(self, saved: Any, *tensors: torch.Tensor) -> Call:
        """Begins the backward of the call whose forward returned ``saved``."""
        call = SavedState.call_in(saved)
        if call is None:
            return self.begin(*tensors)
        return self._agree(self._begin_backward(call, list(tensors)))

    def _begin_backward(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        self.calls += 1
        self._pair._waiting.discard(call)
        call.program = self
        if call.arena is None:
            return Call(self).run_eagerly(skip_reasons.FORWARD_WAS_EAGER)
        if self.collectives is not None and not self.collectives.are_alive():
            return call.run_eagerly(DESTROYED)
        call.arena.enter()
        if backward_keeps_graph():  # the call keeps its arena for the next backward
            return Call(self).run_eagerly(skip_reasons.RETAINED)
        if call.mode is Mode.EAGER:
            return call.run_eagerly(skip_reasons.FORWARD_WAS_EAGER)
        if skip_reasons.is_watched():
            return call.run_eagerly(skip_reasons.WATCHED)
        if call.recording is not None:
            for trace in call.recording.backwards:
                if trace.guard.holds(inputs) and call.allocates_in(trace.scratch):
                    call.trace, call.verifies = trace, self._is_due()
                    return call.enter(Mode.REPLAY)
        if (reason := self._unsupported(inputs)) is not None:
            return call.run_eagerly(reason)
        self._hold_scratch(call)
        if call.recording is None:
            call.key = self._key(inputs)
            return call.enter(Mode.WARMUP)
        return self._capture_backward(call, call.recording, inputs)

    def _capture_backward(self, call: Call, recording: Recording, inputs: list[torch.Tensor]) -> Call:
        """Warms up or captures a backward for inputs that the recording has none for."""
        if recording.backwards and not recording.keeps_saved:  # what the forward saved may have been reused
            self._pair._backward_varies = True
            self._pair.drop(recording)
            self._warm[self._key(inputs)] = None
            self._count_moves(recording.backwards, inputs)
            reason = "the backward's inputs are not laid out as when it was captured, so both are captured anew"
            return call.run_eagerly(reason, strict=False)
        call.owned = dict(recording.owned)
        self._warm_up_or_capture(call, inputs)
        if call.mode is Mode.CAPTURE:
            self._pair.drop(recording)  # of use again only when it is complete
            if not recording.keeps_saved:
                call.owned = recording.owned
        return call

    def _hold_arena(self) -> Arena | None:
        """A free arena, if there is one, or after garbage was collected: outputs in reference cycles hold arenas."""
        arena = self._arenas.hold(self._used)
        if arena is None:
            self._found_held += 1
            if self._found_held >= self._collect_at:
                gc.collect()
                arena = self._arenas.hold(self._used)
                if arena is None:
                    self._collect_at *= 2  # these are no cycles: look again, but less and less often
                else:
                    self._found_held, self._collect_at = 0, 1
                    self.remark = _CYCLES
        if arena is not None and arena not in self._used:
            self._used.append(arena)
        return arena

    def _hold_scratch(self, call: Call) -> None:
        """Takes a scratch arena for a backward that is warmed up or captured, if it is to have one."""
        if call.scratch is None and (scratch := self._arenas.hold_scratch()) is not None:
            call.scratch = scratch
            scratch.enter()
            if scratch not in self._pair._used_scratch:
                self._pair._used_scratch.append(scratch)

    def _warm_up_or_capture(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        call.key = self._key(inputs)
        if call.key not in self._warm:
            return call.enter(Mode.WARMUP)
        assert call.arena is not None
        if call.recording is None:
            call.recording = Recording(call.arena)
            self._count_moves([r.forward for r in self.recordings if r.forward is not None], inputs)
        else:
            self._count_moves(call.recording.backwards, inputs)
        recording = call.recording
        static = [
            i
            for i, (name, tensor) in enumerate(zip(self.inputs, inputs))
            if tensor is not None and (self.is_static(name, recording) or call.owns(name, tensor))
        ]
        guard = Guard(inputs, static, self.written, self.settings)
        call.trace = TraceRecording(guard, [None] * len(self.regions), self.calls, call.scratch)
        call.verifies = self.options.verify is not None
        self._count_sample()
        return call.enter(Mode.CAPTURE)

    def skip_reason(self) -> str | None:
        """Why no call on this thread can replay a graph now."""
        return skip_reasons.skip_reason(self.backend, saves=bool(self._saved))

    def fast_path_skip_reason(self) -> str | None:
        """Why the next call on this thread must not take the fast path, of a program that samples calls."""
        return "it is verified" if self.calls >= self.verify_after else self.skip_reason()

    def may_replay_backward(self) -> bool:
        """Whether the backward under way may replay a graph: none is verified, and nothing keeps what is saved."""
        verifies = self._is_quarantined or self.calls >= self.verify_after
        return not (verifies or backward_keeps_graph() or skip_reasons.is_watched())

    def is_alone(self, arena: Arena) -> bool:
        """Whether no call but the one that holds ``arena`` awaits its backward, or runs."""
        pair = self._pair
        return not pair._waiting and not any(other is not arena and other.is_held() for other in pair._used)

    @cached_property
    def is_one_region(self) -> bool:
        """Whether the whole trace is one region."""
        return (
            len(self.regions) == 1
            and not self.regions[0].io.scalars
            and all(isinstance(step, Region) or self.ops.ops[step.op].bookkeeping for step in self.plan.steps)
        )

    def _is_due(self) -> bool:
        """Whether to verify the call that has just been counted."""
        if self.calls <= self.verify_after:
            return False
        self._count_sample()
        return True

    def _count_sample(self) -> None:
        if isinstance(self.options.verify, int):
            self.verify_after = self.calls + self.options.verify - 1

    def raise_if_strict(self, reason: str) -> None:
        if self.options.strict and reason not in skip_reasons.HELD_ELSEWHERE:
            fix = skip_reasons.FIXES.get(reason, "mend that (print(explain(fn)) has the plan)")
            raise CaptureError(f"{self.kind} call {self.calls}", reason, fix)

    @property
    def awaiting_capture(self) -> int:
        """How many layouts of inputs were warmed up, and are captured when they come again."""
        return len(self._warm.keys() - self._captured)

    def _unsupported(self, inputs: Sequence[Any]) -> str | None:
        """Why no graph can ever be right for these inputs."""
        for name, tensor in zip(self.inputs, inputs):
            if not is_plain(tensor):
                return f"{self.ops.described(name)} is a {type(tensor).__name__}, not a plain tensor"
            if tensor is not None and (is_zero_tensor(tensor) or not has_storage(tensor)):
                return f"{self.ops.described(name)} is a {tensor.layout} tensor without memory of its own"
        if self.written:
            static = {i for i, is_static in enumerate(self._static) if is_static}
            if not OverlapGuard.of(inputs, static, self.written).admits(inputs):
                names = ", ".join(self.ops.described(self.inputs[i]) for i in sorted(self.written)[:3])
                return f"{names}, written in place, shares memory with another; pass separate tensors"
            if self.refuses_leaves and any(is_leaf_with_grad(inputs[i]) for i in self.written):
                return LEAF
        return None

    def _key(self, inputs: Sequence[torch.Tensor]) -> Any:
        return ((*self._read_settings(),), tuple(layout(inputs[i]) for i in self._keyed))

    def _count_moves(self, traces: Sequence[TraceRecording], inputs: Sequence[torch.Tensor]) -> None:
        """Counts static inputs that are at another address than in the newest of these recordings, if it is young."""
        young = [trace for trace in traces[:1] if self.calls - trace.since <= _LASTING]
        moved = [self.inputs[i] for trace in young for i in trace.guard.moved(inputs)]
        self._pair._moves.update(moved)
        self._pair._captures_for_moves += bool(moved)

    # How a call ends

    def end_forward(self, call: Call, *others: Any) -> SavedState:
        """Ends a forward that awaits its backward: the arena is held until that ran or can no longer come."""
        self._seal(call)
        self._watch(call)
        self._waiting.add(call)
        return SavedState.of(call, others)

    def end_call(self, call: Call) -> None:
        """Ends a call."""
        self._seal(call)
        self._watch(call)
        if self._forward is not None:
            self.backend.order_gradients()
        if call.recording is not None and call.recording.incomplete:
            call.give_up()
        call.release()

    def count_replay(self) -> None:
        """Counts a call that only replays, of a fast path."""
        self.calls += 1
        if self.collectives is not None:
            self.collectives.count_replay()

    def _watch(self, call: Call) -> None:
        if self.collectives is not None and call.mode in (Mode.CAPTURE, Mode.REPLAY):
            self.collectives.watch()

    def _seal(self, call: Call) -> None:
        """What was warmed up or recorded is complete from here on."""
        if call.mode is Mode.WARMUP:
            if len(self._warm) >= _MAX_LAYOUTS:
                self._warm.clear()
                self._captured.clear()
            self._warm[call.key] = None
        elif call.mode is Mode.CAPTURE:
            self._captured.add(call.key)
            recording, trace = call.recording, call.trace
            assert recording is not None and trace is not None
            if self._pair is self:
                recording.forward = trace
                recording.owned = {name: t for name, t in call.owned.items() if name in self._saved}
                recording.keeps_saved = self._backward_varies or not recording.owned
            else:
                recording.backwards = [trace, *recording.backwards][: self.options.max_recordings]
                if not recording.keeps_saved:
                    recording.owned.clear()
            if not recording.incomplete:
                self._pair.admit(recording)
            if call.arena is not None:
                call.memory.forget(call.owned.values(), recording.owned.values())

    def admit(self, recording: Recording) -> None:
        """Keeps a recording for later calls; past the bound, the arena's oldest goes."""
        same_arena = [r for r in self.recordings if r.arena is recording.arena]
        for old in same_arena[self.options.max_recordings - 1 :]:
            self.drop(old)
        recording.dropped = False
        self.recordings = [recording, *self.recordings]

    def drop(self, recording: Recording) -> None:
        """No later call replays the recording."""
        recording.dropped = True
        self.recordings = [r for r in self.recordings if r is not recording]

    def close_recordings(self, *, may_wait: bool) -> None:
        """Before a process group goes: destroys all graphs of the pair, which may hold its communicator."""
        waiting = (call.recording for call in self._waiting)
        for recording in [*self.recordings, *(each for each in waiting if each is not None)]:
            recording.close(may_wait=may_wait)
        self.recordings = []

    # What the regions of a call ask

    def is_input(self, name: str) -> bool:
        return name in self._position

    def is_static(self, name: str, recording: Recording) -> bool:
        if name in recording.static:
            return True
        position = self._position.get(name)
        moves = _MAX_MOVES if self._pair._captures_for_moves < _MAX_CAPTURES_FOR_MOVES else 1
        return position is not None and self._static[position] and self._pair._moves[name] < moves

    def retire(self, recording: Recording) -> bool:
        """Drops a recording that did not fit to the end of a call, so that the next call makes one that does.

        Not for ever: returns whether it did.
        """
        pair = self._pair
        if pair._retired >= self.options.max_recordings:
            return False
        pair._retired += 1
        pair.drop(recording)
        return True

    def quarantine(self, call: Call, region: int) -> None:
        for recording in self._pair.recordings:
            traces = [recording.forward] if self._pair is self else recording.backwards
            if any(trace is not None and trace.graphs[region] is not None for trace in traces):
                self._pair.drop(recording)
        self._is_quarantined = True
        call.run_eagerly(f"{self.regions[region].name} disagrees with its ops", strict=False)

    def arenas(self) -> tuple[Arena, ...]:
        """Those that hold the program's recordings. Programs share arenas."""
        return (*self._pair._used, *self._pair._used_scratch)

    def layouts(self) -> Iterator[Mapping[str, Layout]]:
        """The inputs of each call that was warmed up, without those that an earlier region made."""
        names = [self.inputs[i] for i in self._keyed]
        yield from (dict(zip(names, layouts)) for _, layouts in self._warm)


def _writes_with_grad(op: Op) -> bool:
    """Whether it writes in place while gradients are recorded, which a leaf that requires grad does not admit."""
    copies = op.id == "copy_" and bool(op.symbol.kwargs.get("grad_enabled"))
    return copies or any(map(_writes_with_grad, op.subs))
