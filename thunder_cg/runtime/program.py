"""A program, which is what a transformed trace runs: how its calls begin and end, and what was recorded of them."""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.memory import MemoryEstimate
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
from thunder_cg.runtime.recording import Recording, RegionGraph, TraceRecording
from thunder_cg.runtime.region import LEAF, RuntimeRegion
from thunder_cg.runtime.selection import Selection
from thunder_cg.runtime.tensors import Layout, is_leaf_with_grad, is_plain, layout
from thunder_cg.runtime.verifier import Verifier

_logger = logging.getLogger(__name__)

_MAX_LAYOUTS = 1024  # warmed up and remembered; past it, all are warmed up again
_MAX_MOVES = 3  # how often a parameter may move before it is copied like any other input
_LASTING = 100  # calls after which a capture has paid for itself, so that a move does not count
_MAX_CAPTURES_FOR_MOVES = 6  # past it, a parameter is copied once it has moved: not all move in the same step

_LOOK_AGAIN = 16  # calls after the first one that found no room in the memory budget; then twice as many, and so on
_LOOK_AGAIN_AT_LEAST = 1024
_MAX_DISCARDED = 8  # recordings in a row for the memory budget, if captures do not pay
_PAYS = 4  # replays for each capture

_NOT_TIMED = 'select="measured" times nothing, because it communicates, and ranks have to capture alike'
_CYCLES = "memory pools were held by outputs in reference cycles, so the garbage collector ran"


class Program:
    """What the transform made of one trace: its plan, its regions, and what was recorded of them.

    Args:
        name: of what was compiled, for the log.
        forward: of a backward, the program of its forward, which owns the recordings of both.
        saved: names of what the trace keeps for its backward.
        warned: causes of eager calls that the log has a warning about, of all programs of a transform.
    """

    def __init__(
        self,
        *,
        kind: str,
        name: str,
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
        warned: set[str],
        compilation: Compilation,
    ) -> None:
        self.kind, self.ops, self.plan, self.regions = kind, ops, plan, list(regions)
        self.aliasing, self.compilation = aliasing, compilation
        self.label, self._warned = f"{name}, {kind}", warned
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
        ios = [region.io for region in self.regions]
        before: MemoryEstimate | None = forward.memory if forward is not None else None
        self.memory: MemoryEstimate = MemoryEstimate.of(ops, plan, aliasing, ios, saved, before)
        self.needed = self.memory.arena  # bytes that its graphs need in an arena, or more if they turned out to
        self._no_room: str | None = None  # what the memory budget said when it was asked last
        self._look_for_room_at = 0  # how many calls there have to be before it is asked again
        self._look_again_after = _LOOK_AGAIN
        self._arenas = arenas
        arenas.join(self._pair)
        # Of a pair, kept by the program that owns it:
        self.recordings: list[Recording] = []  # what later calls may replay, newest first
        self._used: list[Arena] = []  # kept alive from the warm-up on
        self._used_scratch: list[Arena] = []
        self._waiting: weakref.WeakSet[Call] = weakref.WeakSet()  # calls whose backward is still to come
        self._moves: Counter[str] = Counter()  # how often a static input was at another address
        self._captures_for_moves = 0
        self._discarded = 0  # recordings, because of the memory budget
        self._retired = 0
        self._backward_varies = False  # whether recordings keep what the forward saved, for other backwards
        self._collect_at = 1  # how many calls have to find all arenas held before garbage is collected
        self._found_held = 0
        # Of the module's dispatch, while that lives: drops the fast paths to recordings that were discarded.
        self.fast_paths_dropper: Callable[[], Callable[[], None] | None] = _no_fast_paths
        self._describe_inputs(saved, aliasing)
        self.collectives = self._find_collectives()
        self.selection = self._join_selection()

    def _join_selection(self) -> Selection | None:
        """What times the regions of the pair, of the program that owns it. See Note [Regions that pay]."""
        if self.options.select != "measured":
            return None
        selection = Selection(self.backend) if self._forward is None else self._forward.selection
        if self.collectives is not None:
            self.remark, selection = _NOT_TIMED, None
        if selection is not None:
            selection.join(self.regions, is_one_region=self.is_one_region)
        if self._forward is None:
            return selection
        self._forward.selection = selection
        return None

    def _find_collectives(self) -> Collectives | None:
        """What it communicates. All ranks count the same calls, so those whose collectives are eager count, too."""
        captures = self.options.capture_collectives
        groups = process_groups(self.ops.ops) if captures != "never" else []
        if not groups:
            return None
        collectives = Collectives(groups, asks=captures == "auto", watch=self.backend.watch_collectives)
        collectives.held_by(self._pair)
        return collectives

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
        if self.selection is not None and self.selection.is_complete():
            self._select(self.selection)
        for recording in self.recordings:
            assert recording.forward is not None
            if recording.forward.guard.holds(inputs) and recording.arena.try_hold():
                call = Call.replaying(self, recording)
                recording.arena.enter()
                call.verifies = self._is_due()
                if self.selection is not None:
                    self.selection.begin_replay(call)
                return call
        if skip_reasons.is_held_back():
            return Call(self).run_eagerly(skip_reasons.IN_STEP)
        if (reason := self._unsupported(inputs)) is not None:
            return Call(self).run_eagerly(reason)
        call = Call(self)
        if self.selection is not None and self.selection.begin_eager(call):
            return call.run_eagerly(skip_reasons.TIMED, strict=False)
        call.arena = self._hold_arena()
        if call.arena is None:
            problem = (
                f"all {self.options.max_arenas} memory pools are in use, each until its backward; raise max_arenas"
            )
            return call.run_eagerly(problem)
        call.arena.enter()
        if (reason := self._find_room(call)) is not None:
            call.release()
            return call.run_eagerly(reason, strict=False)
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
            eager = Call(self)
            eager.selection = call.selection
            return eager.run_eagerly(skip_reasons.FORWARD_WAS_EAGER)
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
        if (reason := self._find_room(call)) is not None:
            return call.run_eagerly(reason, strict=False)
        if call.recording is None:
            call.key = self._key(inputs)
            return call.enter(Mode.WARMUP)
        return self._capture_backward(call, call.recording, inputs)

    def _capture_backward(self, call: Call, recording: Recording, inputs: list[torch.Tensor]) -> Call:
        """Warms up or captures a backward for inputs that the recording has none for."""
        if recording.backwards and not recording.keeps_saved:  # what the forward saved may have been reused
            self._pair._backward_varies = True
            self._pair.drop(recording, "its backward gets gradients that are laid out in another way")
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

    def _find_room(self, call: Call) -> str | None:
        """Why what the call is to warm up or capture does not fit into the memory budget. It is not asked each time."""
        if self.options.memory_budget is None:
            return None
        if self.calls >= self._look_for_room_at:
            self._ask_for_room(call, self.needed)
            call.began_empty = call.memory.nbytes() == 0
        return self._no_room

    def _ask_for_room(self, call: Call, expected: int | None) -> None:
        self._no_room = self._arenas.make_room(call, self.regions[0].device, expected)
        if self._no_room is not None:
            self._look_for_room_at = self.calls + self._look_again_after
            self._look_again_after = min(2 * self._look_again_after, _LOOK_AGAIN_AT_LEAST)
            self._pair._discarded = 0

    def _fits(self, call: Call) -> bool:
        """Whether the arenas keep to the memory budget, now that the call has warmed up or captured."""
        if self.options.memory_budget is None:
            return True
        self._ask_for_room(call, None)
        if self._no_room is not None and call.began_empty:
            self.needed = max(self.needed, call.memory.nbytes())
            self._look_for_room_at = 0  # which is known before the next capture begins
        return self._no_room is None

    def captures_pay(self) -> bool:
        """Whether it makes sense to discard recordings for one of this program."""
        captures = max((region.stats.captures for region in self.regions), default=0)
        replays = max((region.stats.replays for region in self.regions), default=0)
        return self._pair._discarded < _MAX_DISCARDED or replays >= _PAYS * captures

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
        is_deselected = [region.is_deselected for region in self.regions]
        if call.mode in (Mode.CAPTURE, Mode.REPLAY) and is_deselected and all(is_deselected):
            self.eager_calls += 1
            self.count_fallback(skip_reasons.DESELECTED, "")
        if call.mode is Mode.WARMUP:
            if len(self._warm) >= _MAX_LAYOUTS:
                self._warm.clear()
                self._captured.clear()
            self._warm[call.key] = None
            self._fits(call)
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
            recording.nbytes = max(recording.nbytes, self.needed)
            recording.incomplete = recording.incomplete or not self._fits(call)
            if not recording.incomplete:
                self._pair.admit(recording)
            if call.arena is not None:
                call.memory.forget(call.owned.values(), recording.owned.values())

    def admit(self, recording: Recording) -> None:
        """Keeps a recording for later calls; past the bound, the least valuable one of the arena goes."""
        rivals = [each for each in self.recordings if each.arena is recording.arena]
        while len(rivals) >= self.options.max_recordings:
            least = min(reversed(rivals), key=lambda each: each.value)
            rivals.remove(least)
            self.discard(least, f"max_recordings={self.options.max_recordings}, and it has the fewest replays per byte")
            for each in rivals:
                each.age()
        recording.dropped = False
        self.recordings = [recording, *self.recordings]

    def drop(self, recording: Recording, why: str = "") -> None:
        """No later call replays the recording. The log says ``why``, unless it comes back."""
        if why and recording in self.recordings:
            _logger.info("%s: graphs are dropped: %s", self.label, why)
        recording.dropped = True
        self.recordings = [r for r in self.recordings if r is not recording]

    def discard(self, recording: Recording, why: str) -> None:
        """Drops a recording for good, and the fast paths to it: its memory is free once no call in flight uses it."""
        self.drop(recording, why)
        if (drop_fast_paths := self.fast_paths_dropper()) is not None:
            drop_fast_paths()

    def discard_for_budget(self, recording: Recording) -> None:
        """Discards it, because other recordings are worth more."""
        self._discarded += 1
        self.discard(recording, f"memory_budget={self.options.memory_budget}, and others are worth more")

    def _select(self, selection: Selection) -> None:
        """Decides which regions of the pair pay, and releases the recordings if some do not."""
        left = selection.leave_eager(has_dispatch=self.fast_paths_dropper() is not None)
        for region in left:
            _logger.info("%s: %s is left eager: %s", self.label, region.name, region.failure)
        if left:
            self.release("regions in it do not pay")
            self.backend.give_back()
        else:
            self.selection = None

    def release(self, why: str = "it was released") -> None:
        """Gives up all recordings, and the arenas. Calls in flight keep what they hold; the next call warms up."""
        in_flight = [call.recording for call in self._waiting if call.recording is not None]
        for recording in [*self.recordings, *in_flight]:
            recording.incomplete = True  # so that no backward to come brings it back
            self.discard(recording, why)
        self._used, self._used_scratch = [], []
        self._warm.clear()
        self._captured.clear()

    def close_recordings(self, *, may_wait: bool) -> None:
        """Before a process group goes: destroys all graphs of the pair, which may hold its communicator."""
        if self.recordings:
            _logger.info("%s: all graphs are dropped: a process group is destroyed", self.label)
        waiting = (call.recording for call in self._waiting)
        for recording in [*self.recordings, *(each for each in waiting if each is not None)]:
            recording.close(may_wait=may_wait)
        self.recordings = []

    def log_progress(self, call: Call, done: str, region: RuntimeRegion) -> None:
        """Says which region of how many a call has warmed up or captured, how long that took, and the memory."""
        if _logger.isEnabledFor(logging.INFO):
            mebibytes = sum(each.nbytes() for each in self.arenas()) / 2**20
            said = f"{done} region {region.index + 1} of {len(self.regions)}, {time.perf_counter() - call.began:.1f} s"
            _logger.info("%s, call %d: %s so far, memory pools hold %.1f MiB", self.label, self.calls, said, mebibytes)

    def count_fallback(self, reason: str, fix: str) -> None:
        """Counts a call, or a region of it, that runs eagerly. The log warns once of each reason that has a fix."""
        self.fallbacks[reason] += 1
        warns = bool(fix) and reason not in self._warned
        self._warned.add(reason)
        said = reason if not fix or reason.endswith(fix) else f"{reason}; {fix}"
        _logger.log(logging.WARNING if warns else logging.INFO, "%s, call %d: eager: %s", self.label, self.calls, said)

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
        pair.drop(recording, "what an eager operator made is not laid out as when it was captured")
        return True

    def quarantine(self, call: Call, region: int) -> None:
        for recording in self._pair.recordings:
            traces = [recording.forward] if self._pair is self else recording.backwards
            if any(trace is not None and trace.graphs[region] is not None for trace in traces):
                self._pair.drop(recording, f"{self.regions[region].name} disagrees with its ops")
        self._is_quarantined = True
        call.run_eagerly(f"{self.regions[region].name} disagrees with its ops", strict=False)

    def recorded(self) -> list[tuple[Recording, list[TraceRecording]]]:
        """All recordings of the pair, and what each has recorded of this program."""
        is_owner = self._pair is self
        return [(r, [r.forward] if is_owner and r.forward is not None else r.backwards) for r in self._pair.recordings]

    def arenas(self) -> list[Arena]:
        """Those that hold the program's recordings, or did. Arenas are shared between programs."""
        return [*self._pair._used, *self._pair._used_scratch]

    def budget(self) -> int | None:
        """The memory budget in bytes of all arenas of the transform. Only for a program with regions."""
        return self._arenas.budget(self.regions[0].device)

    def newest_graph(self, region: str) -> RegionGraph | None:
        """The graph of the region of that name in the newest recording that has one."""
        index = next(each.index for each in self.regions if each.name == region)
        for recording in self._pair.recordings:
            forward = [recording.forward] if recording.forward is not None else []
            for trace in forward if self._pair is self else recording.backwards:
                if (graph := trace.graphs[index]) is not None:
                    return graph
        return None

    def layouts(self) -> Iterator[Mapping[str, Layout]]:
        """The inputs of each call that was warmed up, without those that an earlier region made."""
        names = [self.inputs[i] for i in self._keyed]
        yield from (dict(zip(names, layouts)) for _, layouts in self._warm)


def _no_fast_paths() -> None:
    """There is no dispatch, whose fast paths could hold recordings."""


def _writes_with_grad(op: Op) -> bool:
    """Whether it writes in place while gradients are recorded, which a leaf that requires grad does not admit."""
    copies = op.id == "copy_" and bool(op.symbol.kwargs.get("grad_enabled"))
    return copies or any(map(_writes_with_grad, op.subs))
