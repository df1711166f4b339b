"""A program, which is what a transformed trace runs: how its calls begin and end, and what was recorded of them."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from thunder_cg.analysis.aliasing import has_effect
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.partition import Plan, Region
from thunder_cg.compat.torch import kernel_settings
from thunder_cg.errors import CaptureError
from thunder_cg.options import Options
from thunder_cg.runtime import skip_reasons
from thunder_cg.runtime.arena import Arena, Arenas
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.call import Call, Mode, SavedState
from thunder_cg.runtime.recording import Guard, Recording, Sharing, TraceRecording, layout
from thunder_cg.runtime.region import LEAF, RuntimeRegion, is_graded_leaf, is_plain

_MAX_LAYOUTS = 1024  # warmed up and remembered; past it, all are warmed up again
_MAX_MOVES = 3  # how often a parameter may move before it is copied like any other input


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
        self.fast_path_calls = 0  # calls that went around Thunder's dispatch
        self.no_fast_path: str | None = None  # why none can
        self.samples = isinstance(options.verify, int)
        self.verify_after = 0 if self.samples else sys.maxsize  # so many calls; then the next replay is verified
        self._is_quarantined = False
        self.fallbacks: Counter[str] = Counter()
        self._saved = saved
        self.backend = backend
        self._arenas = arenas
        self._pair = forward if forward is not None else self  # the program that owns the pair's recordings
        arenas.join(self._pair)
        self._recordings: list[Recording] = []  # newest first
        self._used: list[Arena] = []  # kept alive from the warm-up on
        self._waiting: weakref.WeakSet[Call] = weakref.WeakSet()  # whose backward is still to come
        self._warm: set[Any] = set()
        self._moves: Counter[int] = Counter()
        self._retired = 0
        outside = set(ops.args)
        self.inputs = tuple(dict.fromkeys(n for r in regions for n in r.io.inputs if n in outside))
        self.position = position = {name: i for i, name in enumerate(self.inputs)}
        self._static = [ops.values[name].static for name in self.inputs]
        self.written = frozenset(position[n] for r in regions for n in r.io.written if n in position)
        made = {s.name for r in forward.regions for s in r.slots if not s.leaves} if forward is not None else set()
        self._keyed = [i for i, name in enumerate(self.inputs) if name not in made]  # the rest follows from the forward
        for index, region in enumerate(self.regions):
            region.join(self, index)
            names = region.io.inputs
            region.in_arena = [i for i, n in enumerate(names) if n in made and n in region.io.shared]
            made |= {s.name for s in region.slots if not s.leaves}
        self.no_leaves = any(map(_writes_with_grad, ops.ops))
        captured = [ops.ops[i] for region in regions for i in region.region.ops]
        # Whether replays write to nothing but the arena and their results, and draw nothing.
        self.is_invisible = not any(r.io.written for r in regions) and not any(map(has_effect, captured))

    # How a call begins

    def begin(self, *tensors: torch.Tensor) -> Call:
        """Begins a call: finds a recording whose guard holds for ``tensors``, or decides what to do without one."""
        call = Call()
        self.calls += 1
        inputs = list(tensors)
        skip_reason = self.skip_reason()
        if skip_reason is not None:
            return self.eager(call, skip_reason, strict=False)
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

    def skip_reason(self) -> str | None:
        """Why no call on this thread can replay a graph now."""
        return skip_reasons.skip_reason(self.backend, saves=bool(self._saved))

    def fast_path_skip_reason(self) -> str | None:
        """Why the next call on this thread must not go around Thunder's dispatch, of a program that samples calls."""
        return "it is verified" if self.calls >= self.verify_after else self.skip_reason()

    def may_replay_backward(self) -> bool:
        """Whether the backward under way may replay a graph, and need not leave what its forward saved."""
        return not (skip_reasons.graph_is_retained() or skip_reasons.is_watched())

    def may_replay_backward_unverified(self) -> bool:
        """The same for a program with `verify`, whose graphs may be quarantined, or due."""
        return not self._is_quarantined and self.calls < self.verify_after and self.may_replay_backward()

    def is_alone(self, arena: Arena) -> bool:
        """Whether no call but the one that holds ``arena`` awaits its backward, or runs."""
        pair = self._pair
        return not pair._waiting and not any(other is not arena and other.is_held() for other in pair._used)

    @property
    def recordings(self) -> list[Recording]:
        """What later calls may replay, newest first."""
        return self._recordings

    @cached_property
    def is_one_region(self) -> bool:
        """Whether the whole trace is one region."""
        return (
            len(self.regions) == 1
            and not self.regions[0].io.numbers
            and all(isinstance(step, Region) or self.ops.ops[step.op].bookkeeping for step in self.plan.steps)
        )

    def _begin_without_recording(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        problem = self._unfit(inputs)
        if problem:
            return self.eager(call, problem)
        arena = self._arenas.hold(self._used)
        if arena is None:
            limit = self.options.max_arenas
            return self.eager(call, f"all arenas are held by calls in flight (max_arenas={limit}); raise max_arenas")
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
            if tensor is not None and (self.is_static(name, call.recording) or call.owns(name, tensor))
        ]
        call.part = TraceRecording(Guard(inputs, static, self.written), [None] * len(self.regions))
        call.mode = Mode.CAPTURE
        call.verifies = self.options.verify is not None
        self._count_sample()
        return call

    def begin_backward(self, others: Any, *tensors: torch.Tensor) -> Call:
        """Begins the backward of a call whose forward returned ``others``."""
        call = getattr(others, "call", None)
        if call is None and isinstance(others, list):  # the list of both saved collections, not yet taken apart
            call = next((o.call for o in others if isinstance(o, SavedState)), None)
        if call is None:
            return self.begin(*tensors)
        self.calls += 1
        self._pair._waiting.discard(call)
        if call.arena is None:
            return self.eager(Call(), "its forward ran eagerly", strict=False)
        call.arena.enter()
        if skip_reasons.graph_is_retained():
            return self.eager(Call(), skip_reasons.RETAINED, strict=False)
        if call.mode is Mode.EAGER:
            return self.eager(call, "its forward ran eagerly", strict=False)
        if skip_reasons.is_watched():
            return self.eager(call, skip_reasons.WATCHED, strict=False)
        inputs = list(tensors)
        recording = call.recording
        part = recording.parts.get(self.kind) if recording is not None else None
        if part is not None and part.guard.holds(inputs):
            call.part, call.mode, call.verifies = part, Mode.REPLAY, self._is_due()
            return call
        problem = self._unfit(inputs)
        if problem:
            return self.eager(call, problem)
        if recording is None:
            call.key = self._key(inputs)
            self.eager_calls += 1
            return call
        if part is not None:
            retired = self.retire(recording)
            reason = "the backward's inputs are not laid out as when it was captured"
            return self.eager(call, reason, strict=not retired)
        call.owned = recording.owned
        self._warm_up_or_capture(call, inputs)
        if call.mode is Mode.WARMUP:  # the recording still waits for its backward
            call.owned = dict(recording.owned)
        else:  # it gives its memory up from here on, and is of use again only when it is complete
            self._pair.drop(recording)
        return call

    def eager(self, call: Call, reason: str, *, strict: bool = True) -> Call:
        self.eager_calls += 1
        self.fallbacks[reason] += 1
        call.mode = Mode.EAGER
        if strict and self.options.strict:
            raise CaptureError(f"{self.kind} call {self.calls}", reason, "mend that (print(explain(fn)) has the plan)")
        return call

    def _unfit(self, inputs: Sequence[Any]) -> str | None:
        """Why no graph can ever be right for these inputs."""
        for name, tensor in zip(self.inputs, inputs):
            if not is_plain(tensor):
                return f"input {name!r} is a {type(tensor).__name__}, not a plain tensor"
            if tensor is not None and (tensor._is_zerotensor() or not torch._C._has_storage(tensor)):
                return f"input {name!r} is a {tensor.layout} tensor without memory of its own"
        if self.written:
            static = {i for i, is_static in enumerate(self._static) if is_static}
            if not Sharing.of(inputs, static, self.written).admits(inputs):
                names = ", ".join(repr(self.inputs[i]) for i in sorted(self.written)[:3])
                return f"an input that is written in place ({names}) shares memory with another; pass separate tensors"
            if self.no_leaves and any(map(is_graded_leaf, map(inputs.__getitem__, self.written))):
                return LEAF
        return None

    def _key(self, inputs: Sequence[torch.Tensor]) -> Any:
        return (kernel_settings(), tuple(layout(inputs[i]) for i in self._keyed))

    def _count_moves(self, inputs: Sequence[torch.Tensor]) -> None:
        for recording in self._recordings[:1]:
            self._moves.update(recording.parts[self.kind].guard.moved(inputs))

    # How it ends

    def end_forward(self, call: Call, *others: Any) -> SavedState:
        """Ends a forward that awaits its backward: the arena is held until that ran or can no longer come."""
        self._seal(call)
        self._waiting.add(call)
        result = SavedState(others)
        result.call = call
        return result

    def end_call(self, call: Call) -> None:
        """Ends a call."""
        self._seal(call)
        if call.recording is not None and call.recording.incomplete:
            call.give_up()
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
            if call.arena is not None:
                call.arena.forget(call.owned.values(), recording.owned.values())

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

    # What its regions ask

    def is_static(self, name: str, recording: Recording) -> bool:
        """Whether the recording has the address of an input baked in."""
        position = self.position.get(name)
        if name in recording.static:
            return True
        return position is not None and self._static[position] and self._moves[position] < _MAX_MOVES

    def quarantine(self, call: Call, region: RuntimeRegion) -> None:
        """No recording that holds the region's graph is replayed any more."""
        for recording in self._pair.recordings:
            part = recording.parts.get(self.kind)
            if part is not None and part.graphs[region.index] is not None:
                self._pair.drop(recording)
        self._is_quarantined = True
        self.eager(call, f"{region.name} disagrees with its ops", strict=False)

    def arena_bytes(self) -> int:
        """Bytes of the arenas that hold the program's recordings. Arenas are shared between programs."""
        return sum(arena.nbytes() for arena in self._pair._used)


def _writes_with_grad(op: Op) -> bool:
    """Whether it writes in place while gradients are recorded, which a leaf that requires grad does not admit."""
    copies = op.id == "copy_" and bool(op.symbol.kwargs.get("grad_enabled"))
    return copies or any(map(_writes_with_grad, op.subs))
