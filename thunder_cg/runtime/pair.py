"""A pair of programs, a forward and its backward: the recordings of both, and the arenas that these are in.

Both programs share the pair, and it knows neither of them. A trace without a backward has a pair of its own.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.options import Options
from thunder_cg.runtime.arena import Arena, Arenas, CallMemory
from thunder_cg.runtime.backend import Loan
from thunder_cg.runtime.call import Call
from thunder_cg.runtime.program_inputs import Moves
from thunder_cg.runtime.recording import Recording

if TYPE_CHECKING:
    from thunder_cg.runtime.selection import Selection

_logger = logging.getLogger(__name__)
_TAKE_TURNS = 2  # graphs of a layout, with results in places of their own
_MOST_BESIDE_LOANS = 4  # captures of a layout; later calls of the pair do so in an arena of which nobody has results
_pairs_of_leaves = WeakTensorKeyDictionary()  # by parameter: the pairs whose backwards have a gradient of it


class Pair:
    """What later calls of a pair may replay, and what the pair keeps alive for that.

    Args:
        label: of the program that its calls begin with, for the log.
    """

    def __init__(self, label: str, options: Options, arenas: Arenas) -> None:
        self._label, self._options, self._arenas = label, options, arenas
        self.recordings: list[Recording] = []  # what later calls may replay, newest first
        # Layouts whose recordings went for others: the kind of a `CallChange`, and the option that bounds them.
        self.lost: dict[Any, tuple[str, tuple[str, ...]]] = {}
        self.awaiting_backward: weakref.WeakSet[Call] = weakref.WeakSet()
        self.groups: list[ProcessGroup] = []  # that its programs communicate in
        self.moves = Moves()
        self.call_memory: CallMemory | None = None  # that its calls take; None without a backward
        self.first_segment = 0  # bytes; of an arena for both programs
        # See Note [Lent gradients].
        self.lends = options.verify is None and options.memory_budget is None
        self.lends_results = self.lends  # see Note [Lent results]
        self._captures_beside_loans: Counter[Any] = Counter()  # by layout
        self.has_moved_gradients = False
        self.backward_varies = False  # whether recordings keep what the forward saved, for other backwards
        self.selection: Selection | None = None  # what times the regions; None if nothing is to be timed
        self.discarded = 0  # recordings, because of the memory budget
        self._retired = 0
        self._used: list[Arena] = []  # kept alive from the warm-up on
        self._sharing: weakref.WeakSet[Pair] = weakref.WeakSet()  # others with a gradient of the same parameter
        self._used_scratch: list[Arena] = []
        self.was_captured_anew = False  # as a function that came later was to share its memory
        self.had_cycles = False  # whether outputs in reference cycles have held arenas
        self._collect_at = 1  # how many calls have to find all arenas held before garbage is collected
        self._found_held = 0
        # Of the module's dispatch, while that lives: drops the fast paths to recordings that were discarded.
        self.fast_paths_dropper: Callable[[], Callable[[], None] | None] = lambda: None
        arenas.join(self)

    # Recordings

    def admit(self, recording: Recording) -> None:
        """Keeps a recording for later calls; past the bound, the least valuable one of the arena goes."""
        rivals = [each for each in self.recordings if each.arena is recording.arena]
        while len(rivals) >= self._options.max_recordings:
            least = min(reversed(rivals), key=lambda each: each.value)
            rivals.remove(least)
            why = f"max_recordings={self._options.max_recordings}, and it saves the fewest launches per byte"
            self._lose(least, "dropped", f"max_recordings={self._options.max_recordings}")
            self.discard(least, why)
            for each in rivals:
                each.age()
        if recording.forward is not None:
            self.lost.pop(recording.forward.key, None)
        recording.dropped = False
        self.recordings = [recording, *self.recordings]

    def drop(self, recording: Recording, why: str = "") -> None:
        """No later call replays the recording. The log says ``why``, unless it comes back."""
        if why and recording in self.recordings:
            _logger.info("%s: graphs are dropped: %s", self._label, why)
        recording.dropped = True
        self.recordings = [each for each in self.recordings if each is not recording]

    def discard(self, recording: Recording, why: str) -> None:
        """Drops a recording for good, and the fast paths to it: its memory is free once no call in flight uses it."""
        self.drop(recording, why)
        if (drop_fast_paths := self.fast_paths_dropper()) is not None:
            drop_fast_paths()

    def discard_for_budget(self, recording: Recording) -> None:
        """Discards it, because other recordings are worth more."""
        self.discarded += 1
        self._lose(recording, "budget", f"memory_budget={self._options.memory_budget}")
        self.discard(recording, f"memory_budget={self._options.memory_budget}, and others are worth more")

    def _lose(self, recording: Recording, kind: str, option: str) -> None:
        if recording.forward is not None:
            self.lost[recording.forward.key] = kind, (option,)

    def stop_lending(self) -> None:
        """Has later backwards copy their gradients out. See Note [Lent gradients]."""
        self.lends, self.has_moved_gradients = False, True
        for recording in self.recordings:
            if any(trace.lent for trace in recording.traces()):
                self.discard(recording, "its backward lends gradients")

    # See Note [Lent results].

    def note_capture_beside_loans(self, key: Any) -> None:
        """Counts a capture of this layout while callers have results. If they hold too many, results are copied out.
        If it is captured again and again, since each time they hold others, it is to be where they hold none."""
        self._captures_beside_loans[key] += 1
        if self._captures_beside_loans[key] > _TAKE_TURNS and self.lends_results:
            self.lends_results = False
            for recording in [*self.recordings]:
                self.discard(recording, "callers hold large results of more calls than graphs take turns")

    def note_places(self, loans: Sequence[Loan], arena: Arena, ranges: Sequence[tuple[int, int]]) -> None:
        """A capture lends these in the arena. Earlier recordings spare what is in none of the earlier ``ranges``."""
        places = [loan.place for loan in loans]
        new = {place for place in places if not any(start <= place[0] < end for start, end in ranges)}
        for _, recording in self._in_inference(arena):
            for trace in recording.traces():
                trace.spared |= new

    def _end_lending_in(self, arena: Arena) -> None:
        """Before a call that trains is in it, which would take another arena while somebody holds a result."""
        for pair, recording in self._in_inference(arena):
            if any(graph is not None and graph.lent_results for trace in recording.traces() for graph in trace.graphs):
                pair.discard(recording, "it lends results in memory that calls train in now")

    def _in_inference(self, arena: Arena) -> list[tuple[Pair, Recording]]:
        """The recordings in the arena, of calls without a backward, and their pairs."""
        pairs = [pair for pair in self._arenas.recorders() if isinstance(pair, Pair) and pair.call_memory is None]
        return [(pair, each) for pair in pairs for each in pair.recordings if each.arena is arena]

    def retire(self, recording: Recording, why: str) -> bool:
        """Drops a recording that did not fit to the end of a call, so that the next call makes one that does.

        Not for ever: returns whether it did.
        """
        if self._retired >= self._options.max_recordings:
            return False
        self._retired += 1
        self.drop(recording, why)
        return True

    def release(self, why: str) -> None:
        """Gives up all recordings, and the arenas. Calls in flight keep what they hold."""
        for recording in self._with_those_in_flight():
            recording.incomplete = True  # so that no backward to come brings it back
            self.discard(recording, why)
        for arena in self._used:
            if arena.hold():  # what it has lent is moved
                arena.release()
        self._used, self._used_scratch = [], []
        self.lost.clear()
        self._captures_beside_loans.clear()

    def close_recordings(self, *, may_wait: bool) -> None:
        """Before a process group goes: destroys all graphs of the pair, which may hold its communicator."""
        if self.recordings:
            _logger.info("%s: all graphs are dropped: a process group is destroyed", self._label)
        for recording in self._with_those_in_flight():
            recording.close(may_wait=may_wait)
        self.recordings = []

    def _with_those_in_flight(self) -> list[Recording]:
        """The recordings, and those that calls which await their backward have made or replayed."""
        in_flight = [call.recording for call in self.awaiting_backward if call.recording is not None]
        return [*self.recordings, *in_flight]

    # Arenas

    def hold_arena(self, *, captures: bool) -> Arena | None:
        """An arena, if there is one, or after garbage was collected: outputs in reference cycles hold arenas.

        Args:
            captures: whether the call is to be captured.
        """

        def join(arena: Arena) -> bool:
            if self.groups or not arena.join(self, captures=captures):
                return False
            if not captures and self.call_memory is not None:
                arena.capture_anew(self.call_memory.shared)
            return True

        avoids_loans = max(self._captures_beside_loans.values(), default=0) >= _MOST_BESIDE_LOANS
        spared: frozenset[object] | None = frozenset() if self.call_memory is not None or avoids_loans else None
        arena = self._arenas.hold(self._used, self.call_memory, join, spared)
        if arena is None:
            self._found_held += 1
            if self._found_held >= self._collect_at:
                gc.collect()
                arena = self._arenas.hold(self._used, self.call_memory, join, spared)
                if arena is None:
                    self._collect_at *= 2  # these are no cycles: look again, but less and less often
                else:
                    self._found_held, self._collect_at, self.had_cycles = 0, 1, True
        if arena is not None:
            if self.call_memory is not None and not arena.trains:
                arena.trains = True
                self._end_lending_in(arena)
            if not arena.waiting_beside():
                arena.call_memory = self.call_memory
            if arena not in self._used:
                self._used.append(arena)
        return arena

    def hold_scratch(self, arena: Arena) -> Arena | None:
        """A scratch arena for a backward that is warmed up or captured, unless it is to be in ``arena``."""
        scratch = self._arenas.hold_scratch(arena)
        if scratch is not None and scratch not in self._used_scratch:
            self._used_scratch.append(scratch)
        return scratch

    def may_use_scratch(self, arena: Arena) -> bool:
        """Whether the backward of the call that holds ``arena`` has a scratch arena, as far as can be told."""
        return bool(self._used_scratch) or self._arenas.is_another_held(arena)

    def arenas(self) -> list[Arena]:
        """Those that hold the pair's recordings, or did. Arenas are shared between pairs."""
        return [*self._used, *self._used_scratch]

    def is_out_of_arenas(self) -> bool:
        """Whether a call that begins now finds no arena."""
        return self._arenas.are_all_held()

    def note_parameters(self, inputs: Iterable[torch.Tensor | None]) -> None:
        """Notes what the backward has gradients of: it shares the leaves among ``inputs`` with other pairs."""
        for leaf in inputs:
            if leaf is not None and leaf.requires_grad and leaf.is_leaf:
                pairs = _pairs_of_leaves.setdefault(leaf, weakref.WeakSet())
                for other in [each for each in pairs if each is not self]:
                    other._sharing.add(self)
                    self._sharing.add(other)
                pairs.add(self)

    def is_alone(self, arena: Arena, token: object) -> bool:
        """Whether no call but the one with ``token`` in ``arena`` awaits its backward, or runs, here and in pairs that
        have a gradient of the same parameter."""
        pairs = (self, *self._sharing)
        return not arena.is_any_waiting(pairs, token) and all(
            not pair.awaiting_backward and not any(other is not arena and other.is_held() for other in pair._used)
            for pair in pairs
        )
