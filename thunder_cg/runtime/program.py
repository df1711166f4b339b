"""A program, which is what a transformed trace runs: how its calls begin and end, and what is counted of them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from thunder_cg.analysis.causes import root_causes
from thunder_cg.analysis.classify import Pattern
from thunder_cg.analysis.coalescing import described
from thunder_cg.analysis.memory import MemoryEstimate, parameter_gradients
from thunder_cg.analysis.ops import process_groups
from thunder_cg.analysis.partition import PlannedTrace, Region
from thunder_cg.analysis.rules import Reason
from thunder_cg.analysis.segments import LEAST_SEGMENT, is_large
from thunder_cg.analysis.sources import calling_line
from thunder_cg.analysis.undefined import Routes
from thunder_cg.compat.autograd import backward_keeps_graph, drop_failed_backwards, in_backward
from thunder_cg.errors import CaptureError, RanksDiffer, SkipReason
from thunder_cg.options import Options
from thunder_cg.progress import Stage, is_shown
from thunder_cg.runtime import skip_reasons
from thunder_cg.runtime.arena import Arenas, CallMemory
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.budget import ProgramBudget
from thunder_cg.runtime.call import Call, Mode, SavedState
from thunder_cg.runtime.changes import FEW, CallChange, Layouts, of_layouts
from thunder_cg.runtime.compilation import Compilation
from thunder_cg.runtime.counts import Counts
from thunder_cg.runtime.guards import Guard
from thunder_cg.runtime.pair import Pair
from thunder_cg.runtime.program_inputs import ProgramInputs
from thunder_cg.runtime.ranks.agreement import Collectives, Round
from thunder_cg.runtime.ranks.groups import keep_eager
from thunder_cg.runtime.ranks.same_options import SameOptions
from thunder_cg.runtime.recording import Recording, RegionGraph, TraceRecording
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.selection import Selection
from thunder_cg.runtime.tensors import Layout

if TYPE_CHECKING:
    from thunder_cg.verify import ReplayVerifier

_logger = logging.getLogger(__name__)

_MAX_LAYOUTS = 1024  # warmed up and remembered; past it, all are warmed up again
_COMPARED = 32  # layouts, the newest ones, with which a new layout is compared
_MOST_PLACES = 4  # lines of the user's that are named of one reason
_LASTING = 100  # calls after which a capture has paid for itself, so that a move does not count

_IN_MEETING = "in a meeting"  # what ranks agree at
_NOT_TIMED = 'select="measured" times nothing, because it communicates, and ranks have to capture alike'
_CYCLES = "memory pools were held by outputs in reference cycles, so the garbage collector ran"
_RESULTS_HELD = (
    "large results are copied out of the graph, since callers held those of two calls when the next one began; where "
    "they drop them, as y = model(x) in a loop does, they take no memory of their own"
)
_HELD = (
    "gradients are copied out of the graph, since some were held when the next call began; with zero_grad() before it, "
    "they take no memory of their own"
)


@dataclass(frozen=True, slots=True)
class SharedState:
    """What all programs of one transform share."""

    options: Options
    backend: Backend
    arenas: Arenas
    # Operators in allow= and deny= that Thunder makes of others, and these.
    split: dict[Pattern, Sequence[str]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # causes of eager calls and ops that the log has a warning about


class Program:
    """What the transform made of one trace: its plan, its regions, and how its calls begin and end.

    Args:
        regions: those of the trace's plan, in order.
        same_options: of the ranks, if these give its collectives their order.
        forward: of a backward, the program of its forward, with which it is a pair.
    """

    def __init__(
        self,
        trace: PlannedTrace,
        regions: Sequence[RuntimeRegion],
        forward: Program | None,
        shared: SharedState,
        verifier: ReplayVerifier,
        compilation: Compilation,
        same_options: SameOptions | None = None,
    ) -> None:
        self.counts = Counts(stats=[region.stats for region in regions])
        self.kind, self.ops, self.plan, self.aliasing = trace.kind, trace.ops, trace.plan, trace.aliasing
        self.regions, self._saved = list(regions), trace.saved
        self.options, self.backend, self._warned = shared.options, shared.backend, shared.warned
        self.split_operators = shared.split
        self.verifier, self.compilation, self.same_options = verifier, compilation, same_options
        self._changes_in_a_row = self._replays_before = 0  # changes since the last replay, and replays at the last one
        self.label = f"{compilation.name}, {trace.kind}"
        self.no_fast_path: str | None = None  # why none can
        self.routes: Routes = ()  # of a backward
        self.fixes: dict[str, str] = {}  # what would change a reason of these, where known
        self._places: dict[str, dict[str, None]] = {}  # lines of the user's, by these reasons
        # After so many calls, the next replay is verified.
        self.verify_after = 0 if isinstance(self.options.verify, int) else sys.maxsize
        self._is_quarantined = False
        self.is_continued = True  # of a forward: whether it saves anything, so that its calls go on in the backward
        self._begins_calls = forward is None  # other programs continue the calls of their forward
        self.pair: Pair = Pair(self.label, self.options, shared.arenas) if forward is None else forward.pair
        in_pool = {name for each in (forward.regions if forward is not None else ()) for name in each.names_in_pool}
        attributes = compilation.attributes if self._begins_calls else frozenset[str]()
        self.inputs = ProgramInputs(self.ops, self.aliasing, self.regions, in_pool, attributes)
        self._warm: dict[Any, bool] = {}  # keys that were warmed up, in order, and whether each was captured since
        self._eager_layout: Any = None  # of the first call, if that ran eagerly
        ios = [region.io for region in self.regions]
        before: MemoryEstimate | None = forward.memory if forward is not None else None
        stay = frozenset[str]() if compilation.grad else attributes
        self.memory: MemoryEstimate = MemoryEstimate.of(trace, ios, before, stay)
        needed = self.memory.arena
        if forward is not None:
            gradients = 0  # that are copied out of a scratch arena only
            if self.pair.lends:
                needed = max(needed, self.memory.without_graphs)
                gradients = parameter_gradients(forward.ops, self.ops)
            first = forward.memory.arena
            self.pair.call_memory = CallMemory(first, max(first, needed), self.memory.apart, gradients)
        # A memory budget is compared with what is needed, or with the least that the allocator takes.
        self.pair.first_segment = min(self.memory.first_segment, max(needed, LEAST_SEGMENT))
        self.budget = ProgramBudget(shared.arenas, self.pair, self.regions, needed)
        self._place_regions(in_pool)
        self.collectives = self._find_collectives()
        self._join_selection()

    def _place_regions(self, in_pool: set[str]) -> None:
        """Tells the regions what is around them."""
        for index, region in enumerate(self.regions):
            region.index, region.describe = index, self.ops.described
            region.not_leaves = [i for i in region.written if region.input_names[i] in self.inputs.not_leaves]
            region.aliased_in_pool = [i for i, n in enumerate(region.io.inputs) if n.aliased and n.name in in_pool]
            in_pool |= region.names_in_pool
        # Whether replays write to nothing but the arena and their results, and draw nothing.
        writes = any(each.written for region in self.regions for each in region.io.inputs)
        captured = {op.index for region in self.regions for op in region.ops}
        self.is_invisible = not writes and self.aliasing.effects.isdisjoint(captured)

    def _find_collectives(self) -> Collectives | None:
        """What it communicates. All ranks count the same calls, so those whose collectives are eager count, too."""
        captures = self.options.capture_collectives
        groups = process_groups(self.ops.ops)
        if captures == "never":
            keep_eager(groups, self)
        if captures == "never" or not groups:
            return None
        self.pair.groups += [group for group in groups if group not in self.pair.groups]
        watch = self.backend.watch_collectives
        collectives = Collectives(groups, asks=captures == "auto", watch=watch, together=self.pair.groups)
        collectives.held_by(self.pair)
        return collectives

    def _join_selection(self) -> None:
        """Has the regions timed if the options say so. See Note [Regions that pay]."""
        if self.options.select != "measured":
            return
        if self._begins_calls:
            self.pair.selection = Selection(self.backend)
        if self.collectives is not None:
            self.counts.remark, self.pair.selection = _NOT_TIMED, None
        if self.pair.selection is not None:
            self.pair.selection.join(self.regions, is_one_region=self.is_one_region)

    # How a call begins

    def begin(self, *tensors: torch.Tensor) -> Call:
        """Begins a call: finds a recording whose guard holds for ``tensors``, or decides what to do without one."""
        self.check_options()
        inputs = list(tensors)
        needs_others = self._tries_again()
        return self._agree(self._begin(inputs), needs_others)

    def check_options(self) -> None:
        """To be called before it communicates: see Note [Same options]. `OptionsDiffer` if ranks do."""
        if self.same_options is not None:
            self.same_options.check(self.label)
            self.same_options = None

    def begin_without_regions(self) -> None:
        """Counts a call of a trace in which nothing is captured. After the first one, ``strict=True`` forbids it."""
        self.counts.calls += 1
        causes = root_causes(self.ops, self.plan, self.aliasing)
        is_held = skip_reasons.is_held_back() or self.backend.busy()
        if self.counts.calls > 1 and causes and not is_held:
            first = causes[0]
            problem = f"nothing in it is captured: {first.name} {first.place} is eager ({first.detail})"
            fix = "compile more of the program together" if first.reason == Reason.TOO_SMALL.value else first.fix
            raise CaptureError(self.call_label, problem, fix)

    def _agree(self, call: Call, needs_others: bool = False) -> Call:
        """Has the other ranks know of a call that communicates. See Note [Agreement of ranks].

        Args:
            needs_others: whether a region that it replays nothing for may be captured in a later call.
        """
        if self.collectives is None:
            return call
        meets = self.collectives.meets()
        call.round = self.collectives.next_round()
        if call.mode in (Mode.WARMUP, Mode.EAGER):
            is_warm_up = call.mode is Mode.WARMUP
            call.round.decline("it warms up" if is_warm_up else f"it runs eagerly, since {call.why_eager}")
        elif meets:
            self._meet(call, call.round, could_replay=call.mode is Mode.REPLAY and not needs_others)
        elif call.trace is not None and call.mode is Mode.REPLAY:
            for region, graph in zip(self.regions, call.trace.graphs):
                if graph is None and region.communicates and region.failure is not None:
                    call.round.decline(region.failure.problem, is_settled=region.lacks_ranks)
        return call

    def _meet(self, call: Call, votes: Round, *, could_replay: bool) -> None:
        """Gives a recording up after this call if another rank needs a capture. See Note [Meetings]."""
        try:
            subject = partial(described, self.ops.ops, self.ops.values)
            all_replay = votes.ask(_IN_MEETING, subject, could_replay=could_replay)
        except RanksDiffer:
            all_replay = True
        if could_replay and not all_replay:
            assert call.recording is not None
            self.pair.discard(call.recording, "another rank captures what it holds")
        if call.mode is Mode.REPLAY:
            votes.decline("it replays" + "; its next call captures" * (not all_replay))

    def _tries_again(self) -> bool:
        """Whether this is a meeting, in which what other ranks did not capture with this one may be captured."""
        if self.collectives is None or not self.collectives.meets():
            return False
        lacking = [region for region in self.regions if region.lacks_ranks and region.stays_eager]
        if not lacking:
            return False
        for region in lacking:
            region.failed_attempts, region.stays_eager = 0, False
        for recording in [*self.pair.recordings]:
            self.pair.discard(recording, "what other ranks did not capture may be captured now")
        return True

    def _begin(self, inputs: list[torch.Tensor]) -> Call:
        self.counts.calls += 1
        if (reason := self.skip_reason()) is not None:
            if not (self._eager_layout or self._warm or skip_reasons.is_watched() or self.inputs.unsupported(inputs)):
                self._eager_layout = self.inputs.key(inputs)
            return Call(self).run_eagerly(reason)
        if self.collectives is not None and not self.collectives.are_alive():
            return Call(self).run_eagerly(skip_reasons.GROUP_IS_GONE)
        pair = self.pair
        if pair.selection is not None and pair.selection.is_complete():
            self._select(pair.selection)
        call = self._begin_replay(inputs)
        if call is None and pair.recordings:
            drop_failed_backwards()  # which may hold an arena
            call = self._begin_replay(inputs)
        return call or self._begin_without_recording(inputs)

    def _begin_replay(self, inputs: list[torch.Tensor]) -> Call | None:
        """A call that replays a recording, if there is one for it."""
        pair = self.pair
        for recording in pair.recordings:
            assert recording.forward is not None
            beside, spared = recording.forward.beside, recording.forward.spared
            if recording.forward.guard.holds(inputs) and recording.arena.hold(beside, spared):
                if recording.dropped:  # to move what it had lent
                    recording.arena.release()
                    continue
                call = Call.replaying(self, recording)
                recording.arena.enter()
                call.verifies = self._verifies()
                if pair.selection is not None:
                    pair.selection.begin_replay(call)
                return call
        return None

    def _begin_without_recording(self, inputs: list[torch.Tensor]) -> Call:
        """A call that no recording is for: warms up or captures, or runs eagerly where it cannot."""
        pair = self.pair
        if skip_reasons.is_held_back():
            return Call(self).run_eagerly(skip_reasons.IN_STEP)
        if (reason := self.inputs.unsupported(inputs)) is not None:
            return Call(self).run_eagerly(reason)
        call = Call(self)
        if pair.selection is not None and pair.selection.begin_eager(call):
            return call.run_eagerly(skip_reasons.TIMED, strict=False)
        call.arena = pair.hold_arena(captures=self.inputs.key(inputs) in self._warm)
        if pair.had_cycles:
            self.counts.remark = _CYCLES
        if call.arena is None:
            return call.run_eagerly(skip_reasons.pools_in_use(self.options.max_arenas))
        call.arena.enter()
        if (reason := self.budget.find_room(call)) is not None:
            call.release()
            return call.run_eagerly(reason, strict=False)
        return self._warm_up_or_capture(call, inputs)

    def begin_backward(self, saved: Any, *tensors: torch.Tensor) -> Call:
        """Begins the backward of the call whose forward returned ``saved``."""
        self.check_options()
        call = SavedState.call_in(saved)
        if call is None:
            self.counts.calls += 1
            return self._agree(Call(self).run_eagerly(skip_reasons.NO_FORWARD))
        inputs = list(tensors)
        needs_others = self._tries_again()
        return self._agree(self._begin_backward(call, inputs), needs_others)

    def _begin_backward(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        self.counts.calls += 1
        self.pair.awaiting_backward.discard(call)
        call.program = self
        if call.arena is None:
            eager = Call(self)
            eager.selection, eager.why_eager, eager.made = call.selection, call.why_eager, call.made
            return eager.run_eagerly(skip_reasons.FORWARD_WAS_EAGER)
        if self.collectives is not None and not self.collectives.are_alive():
            return call.run_eagerly(skip_reasons.GROUP_IS_GONE)
        call.enter()
        if backward_keeps_graph():  # the call keeps its arena for the next backward
            return Call(self).run_eagerly(skip_reasons.RETAINED)
        if call.mode is Mode.EAGER:
            return call.run_eagerly(skip_reasons.FORWARD_WAS_EAGER)
        if skip_reasons.is_watched():
            return call.run_eagerly(skip_reasons.WATCHED)
        if call.recording is not None:
            for trace in call.recording.backwards:
                if trace.guard.holds(inputs) and call.resume(trace.beside) and call.try_hold_scratch(trace.scratch):
                    call.trace, call.verifies = trace, self._verifies()
                    return call.switch_to(Mode.REPLAY)
        if (reason := self.inputs.unsupported(inputs)) is not None:
            return call.run_eagerly(reason)
        if not call.resume(call.arena.owning()):
            why, recording = skip_reasons.OTHERS_WAIT, call.recording
            is_for_ever = recording is not None and not self.pair.retire(recording, why.problem)
            return call.run_eagerly(why, strict=is_for_ever)
        if call.token is not None:
            call.arena.allocates(call.token)
        if call.scratch is None and (scratch := self.pair.hold_scratch(call.arena)) is not None:
            call.scratch = scratch
            scratch.enter()
        if (reason := self.budget.find_room(call)) is not None:
            return call.run_eagerly(reason, strict=False)
        if call.recording is None:
            call.key = self.inputs.key(inputs)
            self._reserve(call)
            return call.switch_to(Mode.WARMUP)
        return self._capture_backward(call, call.recording, inputs)

    def _capture_backward(self, call: Call, recording: Recording, inputs: list[torch.Tensor]) -> Call:
        """Warms up or captures a backward for inputs that the recording has none for."""
        if recording.backwards and not recording.keeps_saved:  # what the forward saved may have been reused
            self.pair.backward_varies = True
            self.pair.drop(recording, "its backward gets gradients that are laid out in another way")
            self._count_moves(recording.backwards, inputs)
            problem = "the backward's inputs are not laid out as when it was captured, so both are captured anew"
            return call.run_eagerly(SkipReason(problem), strict=False)
        call.owned = dict(recording.owned)
        self._warm_up_or_capture(call, inputs)
        if call.mode is Mode.CAPTURE:
            self.pair.drop(recording)  # of use again only when it is complete
            if not recording.keeps_saved:
                call.owned = recording.owned
        return call

    def _warm_up_or_capture(self, call: Call, inputs: list[torch.Tensor]) -> Call:
        call.key = self.inputs.key(inputs)
        if self._begins_calls and call.recording is None:
            self._note_change(call, inputs)
            if self._saved:
                self.pair.note_parameters(inputs)
        if self._is_inference:  # a backward may read what an attribute was in the forward
            self.inputs.note(inputs)
        if call.key not in self._warm:
            self._reserve(call)
            return call.switch_to(Mode.WARMUP)
        assert call.arena is not None
        if self.pair.call_memory is None and call.arena.places_on_loan():
            self.pair.note_capture_beside_loans(call.key)
            self.backend.give_back()  # as the memory of a warm-up's result, which nobody has any more
            if self.gives_large and not self.pair.lends_results:
                self.counts.remark = self.counts.remark or _RESULTS_HELD
        if call.recording is None:
            call.recording = Recording(call.arena)
            call.arena.trim()  # what warm-ups needed is laid out in another way
            self._count_moves([r.forward for r in self.pair.recordings if r.forward is not None], inputs)
        else:
            self._count_moves(call.recording.backwards, inputs)
            if self.pair.has_moved_gradients:
                self.counts.remark = self.counts.remark or _HELD
        self._reserve(call)
        recording = call.recording
        static = [
            i
            for i, (name, tensor) in enumerate(zip(self.inputs.names, inputs))
            if tensor is not None and (self.is_static(name, recording) or call.owns(name, tensor))
        ]
        guard = Guard(inputs, static, self.inputs.written, self.inputs.settings)
        beside = recording.arena.waiting_beside(recording.token)
        graphs: list[RegionGraph | None] = [None] * len(self.regions)
        call.trace = TraceRecording(guard, graphs, self.counts.calls, call.scratch, call.key, beside=beside)
        call.verifies = self.options.verify is not None
        self._schedule_verification()
        return call.switch_to(Mode.CAPTURE)

    def _reserve(self, call: Call) -> None:
        """Before a warm-up or a capture: has an empty arena begin as Note [First segment] in segments.py says."""
        memory, devices = call.memory, {region.device for region in self.regions}
        if len(devices) != 1:
            return
        if memory is call.scratch:
            nbytes = self.memory.first_apart
        elif self.pair.may_use_scratch(memory):
            nbytes = self.memory.first_segment if self._begins_calls else 0
        else:
            nbytes = self.pair.first_segment
        memory.first_segments[devices.pop()] = nbytes

    def _note_change(self, call: Call, inputs: list[torch.Tensor]) -> None:
        """Finds because of what the call replays nothing. See Note [Why nothing replays]."""
        change = self._change(call.key, inputs)
        if change is None:
            return
        self._changes_in_a_row = self._changes_in_a_row + 1 if self.replays == self._replays_before else 1
        self._replays_before = self.replays
        never_replay = max(self._changes_in_a_row, self.compilation.unreplayed) >= FEW
        self.compilation.unreplayed = 0
        if never_replay and (about := f"{self.label}: {change.kind} {change.names}") not in self._warned:
            self._warned.add(about)
            _logger.warning("%s: %s; %s; %s", self.label, change.problem, change.cost, change.fix)
        if self.options.strict and (never_replay or change.kind == "dropped"):
            self.counts.fallbacks["strict=True raised"] += 1
            call.release()
            raise CaptureError(self.call_label, f"{change.problem}; {change.cost}", change.fix)

    def _change(self, key: Any, inputs: list[torch.Tensor]) -> CallChange | None:
        """What differs from all that was warmed up or captured before; None if the call repeats an earlier one."""
        changes = self.compilation.changes
        if key not in self._warm:
            if not self._warm:
                return self.compilation.change
            return of_layouts(changes, [*map(self._layouts, [*self._warm][-_COMPARED:])], self._layouts(key))
        if (why := self.pair.lost.get(key)) is not None:
            return changes.add(*why, len(self._warm))
        newest = next((each.forward for each in self.pair.recordings if each.forward is not None), None)
        moved = newest.guard.moved(inputs) if newest is not None else []
        return changes.add("moved", [self._users_name(self.inputs.names[i]) for i in moved]) if moved else None

    def _layouts(self, key: Any) -> Layouts:
        layouts = {self._users_name(name): layout for name, layout in self.inputs.layouts(key).items()}
        return self.inputs.settings_in(key), layouts

    def _users_name(self, name: str) -> str:
        return self.compilation.parameters.get(name) or self.ops.values[name].users_name

    def _count_moves(self, traces: Sequence[TraceRecording], inputs: Sequence[torch.Tensor]) -> None:
        """Counts static inputs that are at another address than in the newest of these recordings, if it is young."""
        young = [trace for trace in traces[:1] if self.counts.calls - trace.since <= _LASTING]
        self.pair.moves.add([self.inputs.names[i] for trace in young for i in trace.guard.moved(inputs)])

    def skip_reason(self) -> SkipReason | None:
        """Why no call on this thread can replay a graph now."""
        return skip_reasons.skip_reason(self.backend, saves=bool(self._saved))

    def may_take_fast_path(self) -> bool:
        """Whether the next call on this thread may: it is not verified, and no ranks meet."""
        meets = self.collectives is not None and self.collectives.meets()
        return not (meets or self.counts.calls >= self.verify_after or self.skip_reason() is not None)

    def may_replay_backward(self) -> bool:
        """Whether the backward under way may replay a graph: none is verified, and nothing keeps what is saved."""
        meets = self.collectives is not None and self.collectives.meets()
        verifies = self._is_quarantined or self.counts.calls >= self.verify_after
        return not (meets or verifies or backward_keeps_graph() or skip_reasons.is_watched())

    @property
    def _is_inference(self) -> bool:
        return self.kind == "forward" and self.pair.call_memory is None  # a backward may have a pair of its own

    @property
    def may_hold_workspaces(self) -> bool:
        """Whether a warm-up may have workspaces of libraries in its arena: a budget would count them."""
        return self._is_inference and self.options.memory_budget is None

    @cached_property
    def gives_large(self) -> bool:
        """Whether results are large enough to be lent, and may be. See Note [Lent results]."""
        may_lend = self._is_inference and self.is_one_region and self.collectives is None
        outputs = [each for region in self.regions for each in region.io.outputs if each.copied_out]
        return may_lend and any(is_large(self.ops.values[each.name].nbytes) for each in outputs)

    @cached_property
    def is_one_region(self) -> bool:
        """Whether the whole trace is one region."""
        return (
            len(self.regions) == 1
            and not self.regions[0].io.scalars
            and all(isinstance(step, Region) or self.ops.ops[step.op].bookkeeping for step in self.plan.steps)
        )

    def _verifies(self) -> bool:
        """Whether to verify the call that has just been counted. If so, schedules the next verification."""
        if self.counts.calls <= self.verify_after:
            return False
        self._schedule_verification()
        return True

    def _schedule_verification(self) -> None:
        if isinstance(self.options.verify, int):
            self.verify_after = self.counts.calls + self.options.verify - 1

    # How a call ends

    def end_forward(self, call: Call, *others: Any) -> SavedState:
        """Ends a forward that awaits its backward: what it has saved stays until that ran or can no longer come."""
        if not self.is_continued:
            self.end_call(call)
        else:
            self._end_trace(call)
            self.pair.awaiting_backward.add(call)
            call.await_backward()
        return SavedState.of(call, others)

    def end_call(self, call: Call) -> None:
        self._end_trace(call)
        if not self._begins_calls:
            self.backend.order_gradients()
        if call.recording is not None and call.recording.incomplete:
            call.give_up()
        if call.arena is not None and not call.runs:
            call.enter()  # the next call may overwrite what an eager backward has read
        call.release()

    def count_replay(self) -> None:
        """Counts a call that only replays, of a fast path."""
        self.counts.calls += 1
        if self.collectives is not None:
            self.collectives.count_replay()

    def count_raised(self, *, is_counted: bool) -> None:
        """Counts a call whose replay raised, unless it has been counted as a call already."""
        self.counts.calls += not is_counted
        self.counts.fallbacks[skip_reasons.RAISED.problem] += 1

    def _end_trace(self, call: Call) -> None:
        """All regions have run."""
        if call.mode is Mode.WARMUP:
            self.counts.warm_up_seconds += time.perf_counter() - call.began
            self._note_warm(call.key)
            self.budget.keeps(call)
        elif call.mode is Mode.CAPTURE:
            self._keep_recording(call)
        recording, trace = call.recording, call.trace
        if call.mode is Mode.EAGER or recording is None or trace is None:
            return
        if self.regions and not any(trace.graphs):
            self.counts.eager_calls += 1
            if not recording.incomplete:  # else the capture of a region has failed just now, which is counted
                self.count_fallback(self.regions[0].why_eager)

    def _note_warm(self, key: Any) -> None:
        if len(self._warm) >= _MAX_LAYOUTS:
            self._warm.clear()
        self._warm.setdefault(key, False)

    def _keep_recording(self, call: Call) -> None:
        """Has later calls replay what the call recorded, if nothing failed and the memory budget has room for it."""
        if call.key in self._warm:
            self._warm[call.key] = True
        recording, trace = call.recording, call.trace
        assert recording is not None and trace is not None
        if self._begins_calls:
            recording.forward = trace
            if self.pair.call_memory is None:
                own = {each.loan for graph in trace.graphs if graph is not None for each in graph.lent_results}
                trace.spared = {each.place for each in call.memory.on_loan if each.has_owner() and each not in own}
            recording.owned = {name: t for name, t in call.owned.items() if name in self._saved}
            recording.keeps_saved = self.pair.backward_varies or not recording.owned
        else:
            recording.backwards = [trace, *recording.backwards][: self.options.max_recordings]
            if not recording.keeps_saved:
                recording.owned.clear()
        recording.nbytes = max(recording.nbytes, self.budget.needed)
        recording.incomplete = recording.incomplete or not self.budget.keeps(call)
        if not recording.incomplete:
            self.pair.admit(recording)
        if call.arena is not None:
            trace.lent = [graph.lent for graph in trace.graphs if graph is not None and graph.lent is not None]
            call.memory.forget(call.owned.values(), recording.owned.values())

    def _select(self, selection: Selection) -> None:
        """Decides which regions of the pair pay, and releases the recordings if some do not."""
        left = selection.leave_eager(has_dispatch=self.pair.fast_paths_dropper() is not None)
        for region in left:
            _logger.info("%s: %s is left eager: %s", self.label, region.name, region.failure)
        if left:
            self.release("regions in it do not pay")
            self.backend.give_back()
        else:
            self.pair.selection = None

    def release(self, why: str = "it was released") -> None:
        """Gives up all recordings, and the arenas. Calls in flight keep what they hold; the next call warms up."""
        self.pair.release(why)
        self._warm.clear()

    # What is counted, and said in the log

    @property
    def call_label(self) -> str:
        """What the log and errors call the last call."""
        return f"{self.label}, call {self.counts.calls}"

    def raise_if_strict(self, reason: SkipReason) -> None:
        if self.options.strict and reason not in skip_reasons.HELD_ELSEWHERE:
            fix = self.fixes.get(reason.problem, "fix that (print(explain(fn)) has the plan)")
            raise CaptureError(self.call_label, reason.problem, fix)

    def count_fallback(self, reason: SkipReason) -> None:
        """Counts a call, or a region of it, that runs eagerly. The log warns once of each reason that has a fix."""
        problem = reason.problem
        self.counts.fallbacks[problem] += 1
        if reason.fix:
            reason = self._at_places(reason) if reason in skip_reasons.AROUND_CALLS else reason
            self.fixes[problem] = reason.fix
        level = logging.WARNING if reason.fix and problem not in self._warned else logging.INFO
        self._warned.add(problem)
        _logger.log(level, "%s: eager: %s", self.call_label, reason)

    def _at_places(self, reason: SkipReason) -> SkipReason:
        """The fix with the lines from which calls have come, but for those that checkpointing repeats in a backward."""
        places = self._places.setdefault(reason.problem, {})
        repeats = self.kind == "forward" and in_backward()
        if len(places) < _MOST_PLACES and not repeats and (line := calling_line()) is not None:
            places[str(line)] = None
        *others, last = places or ("",)
        at = f"at {', '.join(others)}{' and ' * bool(others)}{last}, " if places else ""
        return reason._replace(fix=at + reason.fix)

    @contextmanager
    def progress(self, call: Call, doing: str, done: str, region: RuntimeRegion) -> Iterator[None]:
        """Shows on a terminal which region of how many a call warms up or captures, and the memory; logs its end."""
        which = f"region {region.index + 1} of {len(self.regions)}"
        held = f", {self._pools_mebibytes():,.0f} MiB" if is_shown(call.began) else ""
        with Stage(lambda: f"{doing} {self.label}: {which}{held}", call.began):
            yield
        if _logger.isEnabledFor(logging.INFO):
            said = f"{done} {which}, {time.perf_counter() - call.began:.1f} s"
            _logger.info("%s: %s so far, memory pools hold %.1f MiB", self.call_label, said, self._pools_mebibytes())

    def _pools_mebibytes(self) -> float:
        return sum(each.nbytes() for each in self.pair.arenas()) / 2**20

    # What the regions of a call ask

    def is_static(self, name: str, recording: Recording) -> bool:
        """Whether the graphs of a recording may have the address of this value in them."""
        return name in recording.static or (self.inputs.may_be_static(name) and self.pair.moves.are_few(name))

    def quarantine(self, call: Call, region: int) -> None:
        """Has no graph of a region replayed again, since one was wrong. Its ops run from here on."""
        why = self.regions[region].why_eager
        for recording, traces in self.recorded():
            if any(trace.graphs[region] is not None for trace in traces):
                self.pair.drop(recording, why.problem)
        self._is_quarantined = True
        self._warned.add(why.problem)  # the region does
        call.run_eagerly(why, strict=False)

    # What the report asks

    def recorded(self) -> list[tuple[Recording, list[TraceRecording]]]:
        """All recordings of the pair, and what each has recorded of this program."""
        return [
            (each, [each.forward] if self._begins_calls and each.forward is not None else each.backwards)
            for each in self.pair.recordings
        ]

    def newest_graph(self, region: str) -> RegionGraph | None:
        """The graph of the region of that name in the newest recording that has one."""
        index = next(each.index for each in self.regions if each.name == region)
        graphs = (trace.graphs[index] for _, traces in self.recorded() for trace in traces)
        return next((graph for graph in graphs if graph is not None), None)

    def layouts(self) -> Iterator[Mapping[str, Layout]]:
        """The inputs of each call that was warmed up, or of the first call, but what an earlier region made."""
        yield from map(self.inputs.layouts, self._warm or [self._eager_layout][: self._eager_layout is not None])

    @property
    def replays(self) -> int:
        """Calls that replayed a graph that an earlier call captured."""
        return max((region.stats.replays - region.stats.captures for region in self.regions), default=0)

    @property
    def awaiting_capture(self) -> int:
        """How many layouts of inputs were warmed up, and are captured when they come again; 0 while nothing can be."""
        cannot_capture = self.pair.is_out_of_arenas() or all(region.stays_eager for region in self.regions)
        return 0 if cannot_capture else [*self._warm.values()].count(False)


def program_of(versions: Iterable[Any]) -> Program | None:
    """The program of a trace, given all that passes made of the trace."""
    left = (getattr(t.get_provenance(), "program", None) for t in reversed([*versions]) if t is not None)
    return next((program for program in left if isinstance(program, Program)), None)
