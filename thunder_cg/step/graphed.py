"""``graphed_step()``: a whole training iteration as one graph, once two calls of it have done the same."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_cg.analysis.sources import users_level
from thunder_cg.compat.distributed import ProcessGroup, default_group, is_alive
from thunder_cg.compat.settings import any_autocast_enabled, functorch_is_active
from thunder_cg.compat.tensors import is_size, tensors_in, tree_flatten, tree_unflatten
from thunder_cg.compat.torch import in_profile
from thunder_cg.errors import (
    CaptureLater,
    CaptureRefused,
    NoRoom,
    OptionError,
    RanksDiffer,
    ReplayRefused,
    SkipReason,
    without_frames,
)
from thunder_cg.options import StepOptions
from thunder_cg.progress import Stage
from thunder_cg.runtime.arena import Arena, Arenas
from thunder_cg.runtime.backends import resolve
from thunder_cg.runtime.changes import for_shapes
from thunder_cg.runtime.failures import note_replay
from thunder_cg.runtime.ranks.agreement import Collectives, Round
from thunder_cg.runtime.ranks.groups import meets
from thunder_cg.runtime.ranks.steps import StepCall, call_of_step
from thunder_cg.runtime.skip_reasons import held_back, skip_reason
from thunder_cg.step import fixes
from thunder_cg.step.attributes import Attributes
from thunder_cg.step.averages import move_counters
from thunder_cg.step.batch import Batch, changed_argument
from thunder_cg.step.calls import Calls
from thunder_cg.step.facts import Difference, Facts, difference
from thunder_cg.step.gradients import FirstGradients, GraphGradient
from thunder_cg.step.memory import PythonCall, making_states_apart, nbytes
from thunder_cg.step.numbers import NumbersRead
from thunder_cg.step.outside import named, states_outside, thread_states
from thunder_cg.step.places import Place
from thunder_cg.step.reads import Called
from thunder_cg.step.recording import CallsMore, StepCapture, StepRecording
from thunder_cg.step.state import StepState, newly_carried, replaced_outside

_MAX_UNSTABLE = 8  # calls that change the state, or find another one, since a replay; then regions' graphs are used
_MAX_CAPTURES = 16  # if they do not pay
_LOOK_AGAIN = 32  # after so many more calls, at the latest
_MAX_LAYOUTS = 64  # remembered
_BEFORE, _AFTER = "before the capture of the step", "after the capture of the step"  # what ranks agree at
_SHAPE = "the shape of "
_BETWEEN = ", between calls"
_IN_TRANSFORM = "a transform of torch.func, such as grad or vmap, is around the step, and a graph has no such tensors"
_FEW_SHAPES = "pad batches to a few shapes, and keep what the step reads as it is from call to call"
_ADDS_TO_FIRST = "an earlier call has made gradients in Python, which a graph has to make if the step adds to them"
_MAX_ELSEWHERE = 2  # graphs that were never replayed since gradients are elsewhere in each call
_ELSEWHERE = SkipReason(
    "the gradients that it reads are in other memory in each call, and somebody holds that memory",
    "make them in the step, or hold none of them when it is called",
)
_FIRST = "the first call of its kind: what the step does is noted"


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a call in Python has shown that left its state as it was."""

    facts: Facts
    needs: int  # bytes of the pool, at least
    without_graphs: int  # bytes that the call has allocated at a time, at least


@dataclass(slots=True)
class _Refusal:
    """Why calls with a layout are not captured. It holds for the state in which the last of the attempts failed."""

    reason: SkipReason
    facts: Facts
    attempts: int
    next_look: int  # the call that looks whether the state has changed: to look at each call would cost too much


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Batch
    layout: Any  # the three parts of the batch's, with what is set for the thread and the process


class GraphedStep:
    """What :func:`graphed_step` returns: call it in the place of the step's function.

    Attributes:
        calls, replays, captures: how many calls there were, and what became of them; the others ran in Python.
        skipped: why calls ran in Python, and how many.
        raised: calls whose replay raised.
    """

    def __init__(self, fn: Callable[..., Any], options: StepOptions) -> None:
        update_wrapper(self, fn)
        self._fn: Callable[..., Any] = fn._fn if isinstance(fn, GraphedStep) else fn
        self._options = options
        self._roots: dict[str, Any] = {f"modules[{i}]": module for i, module in enumerate(options.modules)}
        self._roots |= {f"optimizers[{i}]": optimizer for i, optimizer in enumerate(options.optimizers)}
        self._roots |= {"self": self._fn} if isinstance(self._fn, nn.Module) else {}  # which no name leads to
        self._backend = resolve(options.backend)
        self._max_recordings = options.max_recordings
        self._lock = threading.RLock()
        self._arenas = Arenas(self._backend, 1, poison=False, budget=options.memory_budget)
        self._arenas.join(self)
        self.arena: Arena | None = None  # of all recordings; only calls of the step use it, one at a time
        self.recordings: list[StepRecording] = []  # newest first
        self._left: list[GraphGradient] = []  # by replays, those that are in use
        self._last: StepRecording | None = None  # that was replayed
        self._ready: dict[Any, list[_Ready]] = {}  # by layout, the newest first
        self._communicates: dict[Any, StepCall] = {}  # by layout: the last call in Python; None: whatever its layout
        self._refused: dict[Any, _Refusal] = {}  # by layout
        self._warned: set[SkipReason] = set()
        self._first_gradients = FirstGradients()
        self._unstable = 0  # calls since the last replay
        self._called: dict[Any, Called] = {}  # functions that no bytecode names
        self._attributes = Attributes()  # that were looked up
        self._carried: dict[Any, Place] = {}  # by key: see Note [Carried tensors] in places.py
        self._takes_numbers = True  # see Note [Numbers of fused optimizers] in numbers.py
        self._hopeless = SkipReason("")  # why the calls after that many run in Python
        self._new_layout: Any = None  # the last one
        self._last_call: dict[Any, int] = {}  # in Python, by layout
        self.calls = self.replays = self.captures = self.raised = 0
        self.skipped: Counter[SkipReason] = Counter()
        self.if_repeated: dict[SkipReason, str] = {}  # fixes of these reasons, which need none where they are true once

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, such as one in a copy of the module that has the step, begins anew."""
        return type(self), (self._fn, self._options)

    def __get__(self, owner: Any, kind: type | None = None) -> GraphedStep:
        """As a method: each object has a step of its own."""
        if owner is None or not isinstance(self._fn, FunctionType):
            return self
        step = vars(owner).get(name := f"graphed {self._fn.__qualname__}")
        return step or vars(owner).setdefault(name, type(self)(MethodType(self._fn, owner), self._options))

    @property
    def in_python(self) -> Counter[str]:
        """Why calls ran in Python, in words, and how many."""
        return sum((Counter({str(reason): times}) for reason, times in self.skipped.items()), Counter[str]())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.calls += 1
            if (skipped := skip_reason(self._backend, saves=True)) is not None:
                return self._run_in_python(args, kwargs, SkipReason(skipped.problem))
            if functorch_is_active():
                return self._run_in_python(args, kwargs, SkipReason(_IN_TRANSFORM))
            try:
                batch = Batch.of(args, kwargs, self._backend.device_type)
            except CaptureRefused as error:
                self._warn(error.reason)
                return self._run_in_python(args, kwargs, error.reason)
            call = _Call(args, kwargs, batch, (*batch.layout, *thread_states(), default_group()))
            recording, carried = self._recording_for(call.layout)
            if recording is not None and recording.is_void():
                self._discard(recording)
                recording = None
            if recording is None or carried is None:
                return self._observe(call)
            if (reason := recording.why_not(batch, carried, self._in_the_way(recording))) is not None:
                return self._run(call, reason)
            try:
                if recording.collectives is not None and recording.collectives.meets():
                    return self._meet(recording, carried, call)
                return self._replay(recording, carried, call)
            except ReplayRefused as error:
                return self._run(call, error.reason)

    def _recording_for(self, layout: Any) -> tuple[StepRecording | None, list[Tensor] | None]:
        """The first recording that is for a call, with what it carries in."""
        found = ((each, each.carried_in(layout)) for each in self.recordings)
        return next((pair for pair in found if pair[1] is not None), (None, None))

    def _run(self, call: _Call, reason: SkipReason) -> Any:
        return self._run_in_python(call.args, call.kwargs, reason, call.layout)

    def _run_in_python(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: SkipReason, layout: Any = None
    ) -> Any:
        """Runs the step in Python. The compiled modules in it have their own graphs."""
        self.skipped[reason] += 1
        groups = self._groups(layout if layout in self._communicates else None)
        votes = Round(groups or [])
        votes.decline(str(reason))
        with call_of_step(self._backend.device_type, votes) as call:
            result = self._fn(*args, **kwargs)
        self._communicates[layout] = self._communicates[None] = call
        _forget_oldest(self._communicates)
        is_differentiated = functorch_is_active() or any(each.requires_grad for each in tensors_in((args, kwargs)))
        return result if is_differentiated else _detached(result)

    def _groups(self, layout: Any) -> list[ProcessGroup] | None:
        """Those that a call with the layout communicates in; None if that is not known, or one of them is gone."""
        known = self._communicates.get(layout)
        return known.groups if known is not None and all(map(is_alive, known.groups)) else None

    def _replay(self, recording: StepRecording, carried: Sequence[Tensor], call: _Call) -> Any:
        recording.arena.enter()
        recording.move_out(self._in_the_way(recording))
        self._note_left(recording)
        result = self._launch(recording, carried, call)
        self.replays += 1
        recording.replays += 1
        recording.last_call = self.calls
        self._unstable = 0
        return result

    def _in_the_way(self, recording: StepRecording) -> list[GraphGradient]:
        """Gradients that replays of others have left, in memory that a replay may use."""
        return [] if recording is self._last else [each for each in self._left if each not in recording.apart]

    def _note_left(self, recording: StepRecording) -> None:
        if recording is not self._last:
            self._left, self._last = recording.in_use_after(self._left), recording

    def _observe(self, call: _Call) -> Any:
        """A call that no recording is for: captures it, if an earlier one did the same, else runs it in Python."""
        layout = call.layout
        is_hopeless = self._unstable >= _MAX_UNSTABLE and not meets(self._groups(layout) or [])
        if (reason := self._why_not_looked_at(layout, is_hopeless)) is not None:
            return self._run(call, reason)
        try:
            state = self._state_to_begin_with(layout)
        except CaptureRefused as error:
            self._count_unstable(error.reason)
            return self._run(call, error.reason)
        if (reason := self._why_refused(layout, state)) is not None:
            return self._run(call, reason)
        ready = self._ready_for(layout, state) if self.captures_pay() else None
        adds_to_first = ready is not None and self._first_gradients.are_added_to()
        if ready is not None and not adds_to_first and self._groups(layout) is not None:
            return self._try_capture(state, call, ready)
        with held_back(not is_hopeless):
            return self._run(call, SkipReason(_ADDS_TO_FIRST)) if adds_to_first else self._note(state, call)

    def _state_to_begin_with(self, layout: Any) -> StepState:
        """The state before a call. What the loop has replaced is carried in it."""
        state = self._state()
        if replaced := self._replaced(layout, state):
            self._carried |= replaced
            state = self._state()
        return state

    def _why_not_looked_at(self, layout: Any, is_hopeless: bool) -> SkipReason | None:
        """Why a call runs in Python whatever its state is; None if it may be captured or noted."""
        last_call, self._last_call[layout] = self._last_call.get(layout, self.calls), self.calls
        _forget_oldest(self._last_call)
        if len(self.recordings) == self._max_recordings and self._oldest().last_call > last_call:
            problem = f"all {self._max_recordings} graphs were replayed since the last call of this kind"
            return SkipReason(problem, "raise max_recordings")
        if (refusal := self._refused.get(layout)) is not None and self.calls < refusal.next_look:
            return refusal.reason
        return self._hopeless if is_hopeless and self.calls % _LOOK_AGAIN else None

    def _why_refused(self, layout: Any, state: StepState) -> SkipReason | None:
        """Why a call from this state runs in Python, and need not be noted; None if it may be captured or noted."""
        if (refusal := self._refused.get(layout)) is not None and refusal.facts == state.facts:
            refusal.next_look = self.calls + min(self.calls, _LOOK_AGAIN)
            return refusal.reason
        if not self.captures_pay():
            problem = f"it was captured {self.captures} times and replayed {self.replays} times"
            change = self._change_between(layout, state)
            fix = "" if change is None else fixes.fix_of_change(change, state.facts, self._roots, in_step=False)
            problem += f", since {change.label} changes between calls" if change is not None and fix else ""
            self._refuse(layout, state.facts, SkipReason(problem, fix or _FEW_SHAPES))
            return None
        never_replayed = (each for each in self.recordings if not each.replays)
        if sum(each.is_for_other_gradients(layout) for each in never_replayed) < _MAX_ELSEWHERE:
            return None
        self._refuse(layout, state.facts, _ELSEWHERE)
        return _ELSEWHERE

    def _meet(self, recording: StepRecording, carried: Sequence[Tensor], call: _Call) -> Any:
        """Replays, or captures anew if another rank needs that. See Note [Meetings] in groups.py."""
        groups = self._groups(call.layout)
        try:
            state: StepState | None = self._state()
        except CaptureRefused:
            state = None
        ready = None if state is None else self._ready_for(call.layout, state)
        if groups and state is not None and ready is not None and self.captures_pay():
            return self._try_capture(state, call, ready, recording)
        Round(groups or []).decline("it replays")
        return self._replay(recording, carried, call)

    def _ready_for(self, layout: Any, state: StepState) -> _Ready | None:
        """What an earlier call from the same state has shown."""
        return next((each for each in self._ready.get(layout, ()) if each.facts == state.facts), None)

    def _state(self) -> StepState:
        state = self._whole_state(self._attributes)
        return state.again() if move_counters(state.averages, state.device) else state

    def _whole_state(self, attributes: Attributes | None = None) -> StepState:
        """The state with all attributes of the user's objects, or with those that count."""
        given, called = (self._fn, self._roots, self._backend.device_type), [*self._called.values()]
        return StepState(*given, called, attributes, self._carried, takes_numbers=self._takes_numbers)

    def _try_capture(self, state: StepState, call: _Call, ready: _Ready, known: StepRecording | None = None) -> Any:
        """Captures a call, or runs it in Python and notes why.

        Args:
            known: a recording that could be replayed, and is if no rank needs a capture, or this one fails.
        """
        calls, votes = Calls(self._backend.device_type), Round(self._groups(call.layout) or [])
        try:
            if state.objection is not None:
                raise CaptureRefused(*state.objection)
            if (weight := state.kept_by_autocast()) is not None:
                problem = f"autocast is entered outside of the step, where it may keep {weight} as it was cast before"
                raise CaptureRefused(problem, "enter it in the step alone")
            if (objection := self._communicates[call.layout].objection) is not None:
                raise objection
            could_replay = known is not None
            if votes.ask(_BEFORE, self.name, could_replay=could_replay) and known is not None:
                return self._replay(known, known.state.carried_tensors(), call)
            with held_back(True):
                recording = self._capture(state, call, ready, calls, votes)
        except (CaptureRefused, RanksDiffer) as error:
            failure = without_frames(error)
        else:
            if known is not None and known in self.recordings:
                self._discard(known)
            return self._replay_first(recording, call, ready, calls)
        if not self.recordings and self.arena is not None:
            self.release()
        votes.refuse(_AFTER, str(failure), may_pass=failure.may_pass)
        if known in self.recordings and (carried := known.carried_in(call.layout)) is not None:
            return self._replay(known, carried, call)
        return self._run_after(failure, state, call, calls)

    def _run_after(self, failure: CaptureRefused | RanksDiffer, state: StepState, call: _Call, calls: Calls) -> Any:
        """A call whose capture failed."""
        if isinstance(failure, NumbersRead):  # once only
            self._takes_numbers = False
            self._ready.clear()
            return self._observe(call)
        self._note_failure(failure, call.layout, state.facts)
        if isinstance(failure, CallsMore):
            del self._ready[call.layout]
            self._called |= calls.found
            return self._observe(call)
        with held_back(isinstance(failure, RanksDiffer) and failure.may_pass and self._unstable < _MAX_UNSTABLE):
            return self._run(call, failure.reason)

    def _replay_first(self, recording: StepRecording, call: _Call, ready: _Ready, calls: Calls) -> Any:
        """The first replay of a recording: the capture has run nothing."""
        only_once, carried, unseen = recording.only_once, recording.state.carried_tensors(), None
        self._note_left(recording)
        is_refused = False
        try:
            result = self._launch(recording, carried, call)
            unseen = recording.take_unseen_writes(call.batch.tensors, carried)
        except ReplayRefused as error:
            is_refused, reason = True, error.reason
        finally:
            recording.end_capture(undo=is_refused)
            if only_once is not None:
                self._last = None
                recording.close()
        if is_refused:
            return self._run(call, reason)
        if unseen is not None and only_once is None:
            only_once = unseen
            self._discard(recording)
        if only_once is not None:
            self._learn_from(recording, only_once, call.layout, ready, calls)
        return result

    def _learn_from(
        self, recording: StepRecording, problem: CaptureRefused, layout: Any, ready: _Ready, calls: Calls
    ) -> None:
        """See Note [Captures of one call] in recording.py."""
        self.skipped[problem.reason] += 1
        reads_more = isinstance(problem, CallsMore)
        if not (reads_more or self.recordings):
            self.release()
        self._note_failure(problem, layout, recording.state.facts)
        if not reads_more:
            return
        self._called |= calls.found
        try:
            whole = self._whole_state()
        except CaptureRefused as error:
            self._count_unstable(error.reason)
            return
        if self._attributes.observe(whole.kinds, whole.compiled_kinds):
            del self._ready[layout]
        else:
            self._ready[layout] = [replace(ready, facts=self._state().facts)]

    def _note_failure(self, failure: CaptureRefused | RanksDiffer, layout: Any, facts: Facts) -> None:
        if failure.may_pass:
            self._count_unstable(failure.reason)
        else:
            self._refuse(layout, facts, failure.reason)

    def _count_unstable(self, reason: SkipReason) -> None:
        """Counts a call that does not lead to a replay, and why."""
        self._unstable += 1
        if self._unstable == _MAX_UNSTABLE:
            when = "" if reason.problem.endswith(_BETWEEN) else ", in each step"
            self._hopeless = SkipReason(reason.problem + when, reason.fix)
            self._warn(self._hopeless)

    def _note(self, state: StepState, call: _Call) -> Any:
        """Runs a call in Python, and notes whether it leaves the state as it was."""
        reason, fix = self._what_is_new(call.layout, state)
        self.if_repeated[reason] = fix
        try:
            whole = self._whole_state()
        except CaptureRefused as error:
            self._count_unstable(error.reason)
            return self._run(call, error.reason)
        is_new, seen = self._attributes.observe(whole.kinds, whole.compiled_kinds), self._attributes.seen
        outside, python = states_outside(whole.device), PythonCall(whole, self._backend)
        places, places_of_whole = state.places_of_tensors(), whole.places_of_tensors()
        states_apart = making_states_apart(whole, self._backend)
        gradients = self._first_gradients.noted(whole.parameters)
        with states_apart, gradients, self._attributes.watched(whole.objects):
            result = self._run(call, reason)
        if is_new := is_new or self._attributes.seen != seen:
            state, places = whole, places_of_whole
        try:
            self._compare(state, places, outside, call, reason, python, is_new=is_new)
        except CaptureRefused as error:
            self._count_unstable(error.reason)
        return result

    def _compare(
        self,
        state: StepState,
        places: Sequence[Any],
        outside: dict[str, Any],
        call: _Call,
        reason: SkipReason,
        python: PythonCall,
        *,
        is_new: bool,
    ) -> None:
        """Compares the state, and where its tensors are, before a call in Python, with what there is now."""
        after = state.again()
        carried = newly_carried(state, after, places)
        self._carried |= {place.key: place for place in carried.values()}
        before, now = outside | state.facts, states_outside(state.device) | after.facts
        before, now = ({label: v for label, v in each.items() if label not in carried} for each in (before, now))
        moved = None if is_new else state.moved_since(places, may_move=True)
        changed = fixes.Changed(moved) if moved else fixes.first_changed(before, now, state, self._roots)
        if changed is None:
            needs = python.allocated(after)
            facts = self._state().facts if is_new or carried else state.facts
            self._note_ready(call, reason, _Ready(facts, needs + nbytes(call.batch.tensors), needs))
        else:
            self.skipped -= Counter([reason])
            self._note_change(call.layout, changed, state, self._state() if is_new else state)

    def _note_ready(self, call: _Call, reason: SkipReason, ready: _Ready) -> None:
        """A call that ran in Python for this reason has left its state as it was."""
        kept = 0 if self._groups(call.layout) else self._max_recordings - 1  # ranks may not find the same one
        self._ready[call.layout] = [ready, *self._ready.pop(call.layout, ())[:kept]]
        _forget_oldest(self._ready)
        if reason.problem.startswith(_SHAPE):
            if len(self._ready) == _MAX_UNSTABLE and not self.captures:
                self._warn(reason)
        elif not reason.problem.startswith(_FIRST):
            self._count_unstable(SkipReason(reason.problem, self.if_repeated[reason]))

    def _note_change(self, layout: Any, changed: fixes.Changed, state: StepState, by_now: StepState) -> None:
        """A call in Python has changed its state."""
        # A hook is the cause, maybe. What changes once, as the first step's state does, is not what is in the way.
        problem, fix = changed.reason
        objection = by_now.hooked or (None if fix else by_now.objection)
        if objection is not None:
            self.skipped[objection] += 1
            self._refuse(layout, state.facts, objection)
            return
        self.skipped[SkipReason(f"{problem}, in the step{changed.once}", fix)] += 1
        self._count_unstable(SkipReason(problem, changed.if_repeated))

    def _what_is_new(self, layout: Any, state: StepState) -> tuple[SkipReason, str]:
        """Why a call runs in Python and is noted, and what to do about that if it is so in each call."""
        if (change := self._change_between(layout, state)) is not None:
            fix = fixes.fix_of_change(change, state.facts, self._roots, in_step=False) or fixes.fix_if_repeated(change)
            return SkipReason(f"{change}{state.line_of(change.label) if fix else ''}{_BETWEEN}"), fix
        before, self._new_layout = self._new_layout, layout
        states = [named(each[3:]) for each in (before, layout) if each is not None]
        if len(states) == 2 and (change := difference(*states)) is not None:
            return SkipReason(f"{_FIRST}, since {change}"), ""
        if before is not None and (change := changed_argument(before, layout)) is not None:
            if change.label.startswith(_SHAPE):
                return SkipReason(str(change), for_shapes((change.before, change.after))), ""
            return SkipReason(str(change)), fixes.fix_of_changed_argument(change.after)
        return SkipReason(_FIRST), ""

    def _replaced(self, layout: Any, state: StepState) -> dict[Any, Place]:
        """Where the loop has put a tensor in the place of another one since a call that left its state as it was."""
        known = next(iter(self._ready.get(layout, ())), None)
        return {} if known is None else replaced_outside(known.facts, state)

    def _change_between(self, layout: Any, state: StepState) -> Difference | None:
        """What has changed since the last call with the layout that left its state as it was."""
        known = next(iter(self._ready.get(layout, ())), None)
        return difference(known.facts, state.facts) if known is not None else None

    def _capture(self, state: StepState, call: _Call, ready: _Ready, calls: Calls, votes: Round) -> StepRecording:
        """Captures the step, which runs nothing. `CaptureRefused` or `RanksDiffer` if that cannot be."""
        layout, groups = call.layout, self._groups(call.layout) or []
        is_second = any(each.is_for_other_gradients(layout) for each in self.recordings)
        while len(self.recordings) >= self._max_recordings:
            self._discard(self._oldest())
        if self.arena is None:
            self._backend.give_back()  # what calls in Python have left in PyTorch's cache, which the pool cannot use
            self.arena = self._arenas.single()
        arena = self.arena
        self._make_room(arena, state.device, layout, ready.needs)

        def check() -> None:
            self._make_room(arena, state.device, layout)
            captured.look()
            if not set(groups) == calls.groups.keys() >= {*captured.groups}:
                problem = "it communicates in other groups than the call before, in which another thread may have"
                fix = "call the functions of torch.distributed, since those that C++ calls are not seen"
                raise RanksDiffer(problem, fix, may_pass=True)
            votes.ask(_AFTER, lambda group: " ".join(each.name for each in calls.groups[group]))

        if any_autocast_enabled():
            torch.clear_autocast_cache()
        try:
            self.arena.pool(state.device).enter()
            capture = StepCapture(
                self._fn, call.batch, state, self._backend, arena, self.recordings, check, calls, ready.needs, is_second
            )
            with (
                Stage(lambda: f"capturing the step {self.name}"),
                call_of_step(self._backend.device_type, is_capture=True) as captured,
            ):
                recording = capture.run()
        except (CaptureLater, NoRoom, RanksDiffer):
            raise
        except Exception as error:
            raise CaptureRefused(*(calls.objection or fixes.reason_of(error))) from error
        finally:
            if any_autocast_enabled():  # it holds weights in the pool
                torch.clear_autocast_cache()
        recording.layout, recording.nbytes, recording.without_graphs = layout, ready.needs, ready.without_graphs
        recording.last_call = self.calls
        if groups:
            recording.collectives = Collectives(groups, asks=True, watch=self._backend.watch_collectives)
            recording.collectives.held_by(self)
        if recording.only_once is None:
            self.recordings.insert(0, recording)
            self.captures += 1
            self._refused.pop(layout, None)
        return recording

    def _launch(self, recording: StepRecording, carried: Sequence[Tensor], call: _Call) -> Any:
        try:
            return in_profile(f"CUDAGraph of the step {self.name}", recording.replay, call.batch.tensors, carried)
        except ReplayRefused:
            raise
        except Exception as error:
            self.raised += 1
            note_replay(error, f"the step {self.name}", "the whole step", f"call {self.name} without graphed_step()")
            raise

    def _make_room(self, arena: Arena, device: torch.device, layout: Any, expected: int | None = None) -> None:
        """`NoRoom` if what a capture needs is past the budget: see Note [Memory budget] in runtime/arena.py."""
        kept = len(self.recordings)
        if (reason := self._arenas.make_room([arena], device, self.captures_pay, expected)) is not None:
            may_pass = len(self.recordings) < kept
            if expected is None and not may_pass:
                self._ready[layout] = [replace(each, needs=arena.nbytes()) for each in self._ready[layout]]
            raise NoRoom(*reason, may_pass=may_pass)

    def captures_pay(self) -> bool:
        """Whether captures up to now have been replayed often enough for one more."""
        return self.captures < _MAX_CAPTURES or self.captures <= self.replays // 4

    def discard_for_budget(self, recording: StepRecording) -> None:
        """Gives the recording up for another one."""
        self._discard(recording)

    def _oldest(self) -> StepRecording:
        """The recording that was not used for longest."""
        return min(self.recordings, key=attrgetter("last_call"))

    def _discard(self, recording: StepRecording) -> None:
        self.recordings.remove(recording)
        self._last = None
        recording.close()

    def _refuse(self, layout: Any, facts: Facts, reason: SkipReason) -> None:
        """Calls with the layout run in Python until their state changes. Each attempt that fails doubles the wait."""
        attempts = self._refused[layout].attempts + 1 if layout in self._refused else 1
        self._refused[layout] = _Refusal(reason, facts, attempts, self.calls + 2**attempts)
        _forget_oldest(self._refused)
        self._warn(reason)

    def _warn(self, reason: SkipReason) -> None:
        """Once for each reason."""
        if reason in self._warned:
            return
        self._warned.add(reason)
        said = f"graphed_step({self.name}) runs in Python, with the graphs of the compiled modules in it: {reason}"
        warnings.warn(said, UserWarning, stacklevel=users_level())

    @property
    def name(self) -> str:
        """That of the step's function."""
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def close_recordings(self, *, may_wait: bool) -> None:
        """Before a process group goes: destroys the graphs that may hold its communicator.

        It takes no lock: another thread may be in a call that waits for ranks that are gone.
        """
        closed = [recording for recording in self.recordings if recording.collectives is not None]
        self.recordings = [recording for recording in self.recordings if recording.collectives is None]
        for recording in closed:
            recording.close(may_wait=may_wait)
        self._last = None
        self._ready.clear()
        self._communicates.clear()

    def release(self) -> None:
        """Gives the memory of all graphs of the step back. A later call captures anew."""
        with self._lock:
            while self.recordings:
                self.recordings.pop().close()
            self.arena, self._left, self._last = None, [], None
        self._backend.give_back()

    def budget(self) -> int | None:
        """The memory budget in bytes."""
        return self._arenas.budget(torch.device(self._backend.device_type))

    def awaiting(self) -> list[_Ready]:
        """Of each layout that is not captured, and would be when it comes again if it can: what it needs."""
        captured = {recording.layout for recording in self.recordings}
        return [ready[0] for layout, ready in self._ready.items() if layout not in captured]


def _forget_oldest(by_layout: dict[Any, Any]) -> None:
    while len(by_layout) > _MAX_LAYOUTS:
        del by_layout[next(iter(by_layout))]


def _detached(result: Any) -> Any:
    """The result as a replay returns it: without a history. One tensor stays one."""
    detached: dict[int, Tensor] = {}
    leaves, tree = tree_flatten(result, is_size)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[i] = detached.setdefault(id(leaf), leaf.detach())
    return tree_unflatten(leaves, tree)


def graphed_step(
    fn: Callable[..., Any],
    *,
    modules: nn.Module | Iterable[nn.Module] = (),
    optimizers: Optimizer | Iterable[Optimizer] = (),
    backend: str = "auto",
    max_recordings: int = 4,
    memory_budget: int | float | None = None,
) -> GraphedStep:
    """A training iteration as one CUDA graph: forward, loss, backward, clipping, optimizer, scaler, moving averages.

    ::

        def train_step(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(jmodel(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step = thunder_cg.graphed_step(train_step, modules=[jmodel], optimizers=[optimizer])
        for x, y in loader:
            loss = step(x.cuda(), y.cuda())

    The first calls run in Python, until one has left all that Python knows as it found it. The next one is captured,
    and later ones copy the batch in and replay. Python does not run in a replay, so the step prints and counts nothing
    then. A capture does run it. If a capture fails, what it has changed is undone, and the step runs in Python; what it
    prints or writes to files is there twice then. A call for which no graph is right runs in Python, with the graphs of
    the compiled modules in it, and :func:`thunder_cg.explain` says why.

    Of several processes, each captures its step with the collectives in it, if all ranks of their groups do. Call the
    step on all ranks alike.

    Args:
        fn: takes and returns tensors on one device, in any nesting. It finds what it needs besides as globals,
            variables of closures, or attributes of what it is bound to. A decorated method has a step for each object.
        modules, optimizers: that it uses without naming them.
        backend: as for :func:`thunder_cg.cudagraph_transform`.
        max_recordings: graphs kept, one for each layout of the batch and each state, such as a flag that the step
            reads; the least recently used goes first.
        memory_budget: how much memory the pool of all graphs of the step may have, gradients that stay after a call
            included: bytes, or a share of the device as a float in (0, 1]. Before a capture it is compared with what
            the step needs at least: gradients, the copy of the batch, and what a call in Python has allocated, if it
            raised PyTorch's peak. After the capture it is compared with the pool. The graph with the fewest replays per
            byte goes first. If a step does not fit, it runs in Python, and :func:`thunder_cg.explain` has both values.

    Returns:
        The step. Its results are new tensors without a history, in new lists and dictionaries. A call with an argument
        that requires grad, or in a transform of `torch.func`, runs in Python and keeps the history.

    Raises:
        OptionError: a value that an option cannot have.
        BackendError: the backend does not work on this machine.
    """
    if not callable(fn) or isinstance(fn, GraphedStep):
        raise OptionError("fn", type(fn), "a function", "pass the function of one training step", "graphed_step")
    options = StepOptions(
        tuple(modules) if isinstance(modules, Iterable) and not isinstance(modules, nn.Module) else (modules,),
        tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,),
        backend,
        max_recordings,
        memory_budget,
    )
    return GraphedStep(fn, options)
