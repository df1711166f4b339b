"""One call of a program: how its regions run, and the memory that it holds.

Note [Four modes of a call]
    ``WARMUP``   a layout's first call: everything runs eagerly, regions with their memory in the arena.
    ``CAPTURE``  its second call: each region is recorded, which executes nothing, and then replayed.
    ``REPLAY``   every later call for which the recording's guard holds.
    ``EAGER``    whatever cannot be one of these. The reason is counted. Regions run their ops; nothing is kept.

Note [Who owns a recording's memory]
    In warm-ups and captures, the trace's variables hold addresses in the arena and the call owns the memory. The call
    gives each value up the moment the last region that needs it begins, so memory is reused as in an eager call.
    Afterwards nobody owns the memory: the recording keeps addresses. What a forward saved for a backward that is not
    captured yet must not be reused before, so the recording owns it until then; if the backward's inputs have varied,
    the recording owns it for good, since another backward may have to be captured. What an eager operator makes of such
    memory, a view or what it wrote to, owns none of it, so no region gets any: see `region_io`.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Set
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from thunder_cg.errors import SkipReason
from thunder_cg.runtime.arena import Arena, Waiting
from thunder_cg.runtime.lent import Lent
from thunder_cg.runtime.ranks.agreement import Round
from thunder_cg.runtime.recording import Recording, TraceRecording

if TYPE_CHECKING:
    from thunder_cg.runtime.program import Program
    from thunder_cg.runtime.selection import Selection


class Mode(enum.Enum):
    """See Note [Four modes of a call]."""

    WARMUP = "warm-up"
    CAPTURE = "capture"
    REPLAY = "replay"
    EAGER = "eager"


class Call:
    """One call of a pair of programs: how its regions run, and the arenas that it holds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.mode = Mode.EAGER
        self.thread = get_ident()
        self.why_eager: SkipReason | None = None
        self.verifies = False  # whether replays are compared with eager runs
        self.arena: Arena | None = None  # that it holds, or waits in
        self.token: object = None  # by which the arena knows that it waits: see Note [Shared arenas]
        self.runs = True  # whether it holds the arena, if it has one
        self.scratch: Arena | None = None  # that its backward holds besides: see Note [Scratch arenas]
        self.recording: Recording | None = None
        self.trace: TraceRecording | None = None  # the part of the recording that is for the trace that runs
        self.key: Any = None  # the layout that a warm-up is for
        self.selection: Selection | None = None  # that times its regions
        self.round: Round | None = None  # of a call that communicates: what the ranks say of it
        self.owned: dict[str, torch.Tensor] = {}  # Note [Who owns a recording's memory]
        self.handed_out: set[int] = set()  # addresses of memory of its own that a caller has, as a copy did not fit
        self.made: dict[str, int] = {}  # addresses of what the regions of a forward made inside of a graphed step
        self.lent: list[Lent] = []  # what callers got in the arena's memory, besides that of the recording
        self.began = 0.0  # the warm-up or the capture, on the host's clock in seconds
        self.began_empty = False  # whether nothing else was in the memory that it warms up or captures in

    @classmethod
    def replaying(cls, program: Program, recording: Recording) -> Call:
        """A call that replays the forward of ``recording``, whose arena the caller has taken."""
        call = cls(program)
        recording.replays += 1
        call.arena, call.recording, call.trace = recording.arena, recording, recording.forward
        if not recording.arena.is_shared:
            recording.arena.call_memory = program.pair.call_memory
        return call.switch_to(Mode.REPLAY)

    def switch_to(self, mode: Mode) -> Call:
        """Has the regions from here on run in another mode. Nothing else changes the mode."""
        self.mode = mode
        if mode is not Mode.REPLAY:
            self.began = time.perf_counter()
        if mode is Mode.WARMUP:
            self.program.counts.warm_ups += 1
            self.program.counts.eager_calls += 1
        return self

    def run_eagerly(self, reason: SkipReason, *, strict: bool = True) -> Call:
        """Regions run their ops from here on, because of ``reason``, which is counted; an error if ``strict=True``."""
        self.switch_to(Mode.EAGER)
        self.why_eager = self.why_eager or reason
        self.program.counts.eager_calls += 1
        self.program.count_fallback(reason)
        if strict:
            self.program.raise_if_strict(reason)
        return self

    def give_up(self) -> None:
        """Drops what the call recorded, with the memory of what failed. Callers own what it has lent."""
        self.lent += self.trace.lent if self.trace is not None else []
        self.recording = self.trace = None
        for arena in self.arenas():
            arena.trim(self.token)

    def await_backward(self) -> None:
        """The forward is over: others may use what it has not saved of the arena. See Note [Shared arenas]."""
        arena, recording, owns = self.arena, self.recording, self.mode in (Mode.WARMUP, Mode.CAPTURE)
        if arena is None or not self.runs or not (owns or (arena.is_shared and self.mode is Mode.REPLAY)):
            return
        self.token = recording.token if recording is not None else object()
        self.runs = False
        captures = self.mode is Mode.CAPTURE
        arena.wait(self.token, Waiting(weakref.ref(self), self.program.pair, owns, captures, self.thread))

    def in_arena(self) -> list[torch.Tensor]:
        """The tensors in the arena that the call owns, or that its recording has there."""
        return [*self.owned.values(), *(self.recording.saved() if self.recording is not None else ())]

    def capture_anew(self) -> None:
        """Has the next call capture once more what this one captures, but only once."""
        pair = self.program.pair
        if self.recording is not None and not pair.was_captured_anew:
            pair.was_captured_anew = self.recording.incomplete = True

    def enter(self) -> None:
        """Orders the stream of the backward after what used the arena before."""
        assert self.arena is not None
        (self.arena.enter if self.runs else self.arena.enter_beside)()

    def resume(self, beside: Set[object]) -> bool:
        """Takes the arena for the backward. False if others than those ``beside`` it use it: see `Arena.resume`."""
        assert self.arena is not None
        if self.runs:
            return beside >= self.arena.waiting_beside(self.token)
        self.runs = self.arena.resume(self.token, beside)
        return self.runs

    def release(self) -> None:
        """Ends what it does in the arena, or its waiting there. Nothing of its memory may be used any more."""
        scratch, self.scratch, arena, self.arena = self.scratch, None, self.arena, None
        lent, by_replays, self.lent = self.lent, self.trace.lent if self.trace is not None else [], []
        self.owned = {}
        self.recording = self.trace = None  # the call may live on in an autograd graph whose backward has run
        if scratch is not None:
            scratch.release()
        if arena is not None:
            if lent or by_replays:
                arena.lend(lent, by_replays, self.thread)
            arena.leave(self.token, holds=self.runs)

    def arenas(self) -> list[Arena]:
        """Those that it holds, or waits in."""
        return [arena for arena in (self.arena, self.scratch) if arena is not None]

    @property
    def memory(self) -> Arena:
        """Where what the call makes from here on is allocated."""
        arena = self.scratch if self.scratch is not None else self.arena
        assert arena is not None
        return arena

    def try_hold_scratch(self, scratch: Arena | None) -> bool:
        """Takes the scratch arena that a recorded backward allocates in, if any. False if another call has it."""
        if scratch is not self.scratch:
            if scratch is not None and not scratch.try_hold():
                return False
            if self.scratch is not None:
                self.scratch.release()
            self.scratch = scratch
        if scratch is not None:
            scratch.enter()
        return True

    def owns(self, name: str, tensor: Any) -> bool:
        """Whether ``tensor`` is the arena's value of that name. One that a saved-tensor hook replaced is not."""
        owned = self.owned.get(name)
        return owned is not None and isinstance(tensor, torch.Tensor) and owned.data_ptr() == tensor.data_ptr()

    def __del__(self) -> None:
        if hasattr(self, "arena"):  # not so of a copy that was never finished
            self.release()


class SavedState(tuple):
    """The non-tensors that a forward saves for its backward, and the call that holds their arena."""

    call: Call | None = None

    @classmethod
    def of(cls, call: Call, others: tuple[Any, ...] = ()) -> SavedState:
        state = cls(others)
        state.call = call
        return state

    @staticmethod
    def call_in(saved: Any) -> Call | None:
        """The call that a backward got ``saved`` from: it, or the list of both saved collections, not yet unpacked."""
        if isinstance(saved, list):
            saved = next((each for each in saved if isinstance(each, SavedState)), None)
        return getattr(saved, "call", None)
