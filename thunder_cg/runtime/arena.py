"""Arenas: memory pools that one call uses at a time.

Note [Shared arenas]
    What a forward saves is live until its backward, and until then the rest of its memory serves nobody else, though
    the backward will need most of it. So functions between graph breaks, whose forwards run one after the other and
    whose backwards run in the other order, share one arena: between its forward and its backward, a call waits, and
    calls of other functions may use the arena. Only one call runs in it at a time.

    A call may warm up or capture there only while tensors own all that waiting calls have saved, which is so if these
    warm up or capture as well: then the pool hands none of it to anybody else. Of what is captured, the recording keeps
    which calls waited, and a replay runs only if no others wait now: it may overwrite all but what those have saved.
    Each recording has a token, by which the waiting calls that replay it are known.

    A function that warms up beside others that are captured, since it was compiled one call later, would be captured
    while these replay. If it needs much memory, they are captured once more in the next call, with it.

    An arena that nobody has shared stays with its call until the backward is over, so that fast calls do less. While
    others wait, gradients are not lent.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from thunder_cg.analysis.segments import LEAST_SEGMENT
from thunder_cg.compat import distributed
from thunder_cg.compat.autograd import drop_failed_backwards
from thunder_cg.compat.objects import alive
from thunder_cg.compat.tensors import are_held_unseen, storage_id, storage_use_count
from thunder_cg.errors import SkipReason
from thunder_cg.runtime.backend import Backend, Graph, Loan, Pool
from thunder_cg.runtime.lent import Lent

_NOTHING: frozenset[Any] = frozenset()
_FITS = 2 * LEAST_SEGMENT  # bytes: an arena that is so much too large is not much too large
_MUCH = 32  # a pool that is so many times as large as what a function needs hardly grows with it
_BUSY = 0.1  # seconds for another thread to end what it does in the arena
_GLOO = 0.1  # seconds for its thread to let go of gradients that the program has reduced itself


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Estimates of the bytes that a call takes until its backward is over. See Note [Scratch arenas]."""

    forward: int  # the arena, after the forward
    shared: int  # the arena, if the backward allocates there too, and lends its gradients
    apart: int  # the scratch arena, if the backward allocates there
    gradients: int  # copies of these outside, from a scratch arena

    @property
    def saving(self) -> int:
        """What is saved outside of the scratch arena, if the backward allocates there."""
        return self.shared - self.forward - self.gradients

    def belongs_apart(self, in_flight: Sequence[CallMemory], existing: int) -> bool:
        """Whether the backward is to allocate in a scratch arena, so that all in flight take the least memory.

        Args:
            in_flight: of all calls that await their backward, and of this one.
            existing: bytes that the scratch arena has already.
        """
        limit = best = saved = 0  # those that need no more than the limit allocate there
        for each in sorted(in_flight, key=lambda each: each.apart):
            saved += max(0, each.saving)
            if (gain := saved - max(0, each.apart - existing)) > best:
                limit, best = each.apart, gain
        return self.saving > 0 and self.apart <= limit


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """What an arena knows of a call that awaits its backward. See Note [Shared arenas].

    Attributes:
        call: the call, which may be gone.
        pair: the pair of programs that it is of.
        owns: whether tensors own what it has saved: it warms up or captures.
        captures: whether later calls may replay it.
        thread: that its forward ran on.
    """

    call: weakref.ref[Any]
    pair: Any
    owns: bool
    captures: bool
    thread: int

    def saved(self) -> Sequence[torch.Tensor]:
        """The tensors that it has in the arena."""
        call = self.call()
        return call.in_arena() if call is not None else ()


class Arena:
    """One pool per device, the lock that says who may use them, and which calls wait.

    A release may come from a destructor: on any thread, at any point, even while this thread looks for an arena. So
    holding and releasing are single atomic steps without a queue. Calls begin to wait while they hold the lock, and may
    cease to at any time.

    Attributes:
        is_shared: whether calls of several pairs have ever been in it at once.
        trains: whether calls with a backward have been in it.
        on_loan: where callers may have results in its memory. See Note [Lent results].
    """

    def __init__(self, backend: Backend, poison: bool) -> None:
        self._backend, self._poison = backend, poison
        self._held = threading.Lock()
        self._waiting: dict[object, Waiting] = {}  # by their tokens, the first one first
        self.is_shared = self.trains = False
        self._pools: dict[torch.device, Pool] = {}
        self.on_loan: list[Loan] = []
        self._lent: list[Lent] = []  # Note [Lent gradients]
        self._lent_to = 0  # the thread
        self._unmovable: list[int] = []  # how many hold each of those that somebody holds unseen
        self.first_segments: dict[torch.device, int] = {}  # bytes that a pool with little memory is to get at once
        self.call_memory: CallMemory | None = None  # what the call takes that holds it, or did; None without a backward
        self._has_moved = False  # whether its graphs have lent what was moved, and its memory is too large without
        # Ends the life of everything in its memory but what is lent, and what waiting calls have saved.
        self.release: Callable[[], None] = self._held.release
        if poison:
            self.release = partial(_poison_and_release, self._pools, self._held, self._lent, self._waiting)

    def try_hold(self, beside: Set[object] = _NOTHING, spared: Set[object] | None = None) -> bool:
        """Takes the arena for the caller. False if another call has it, or if somebody held lent gradients.

        If they were moved, recordings have been dropped, maybe the one that the caller was about to replay. Those that
        were lent to another thread are not moved, and the arena is not free.

        Args:
            beside: tokens of the calls that may wait.
            spared: the places of results that callers may still have; None: any, as the call replays nothing.
        """
        if not self._held.acquire(False):
            return False
        may_hold = False
        try:
            places = self.places_on_loan() if self.on_loan else _NOTHING
            may_hold = (not self._waiting or beside >= self._waiting.keys()) and (spared is None or spared >= places)
        finally:
            if not may_hold:
                self._held.release()
        return may_hold and (not self._lent or self._take_back())

    def places_on_loan(self) -> set[object]:
        """Where callers have results in its memory. Only for the holder."""
        self.on_loan[:] = [loan for loan in self.on_loan if loan.is_held()]
        return {loan.place for loan in self.on_loan}

    def hold(self, beside: Set[object] = _NOTHING, spared: Set[object] | None = None) -> bool:
        """`try_hold`, and again if that has moved gradients. The caller looks for dropped recordings afterwards."""
        is_held = self.try_hold(beside, spared) or self.try_hold(beside, spared)
        if is_held and self._has_moved:
            self.trim()
        return is_held

    # See Note [Shared arenas].

    def join(self, pair: Any, *, captures: bool) -> bool:
        """Takes the arena, in which calls of other pairs wait, for a call that warms up or captures. False if it may
        not: somebody else has the arena, a waiting call owns nothing or is of another thread, or the first one, whose
        token changes then, only warms up, so that what is captured beside it would not be replayed."""
        if not self._waiting or not self._held.acquire(False):
            return False
        waiting, thread = [call for _, call in _calls(self._waiting)], threading.get_ident()
        may = waiting and all(each.owns and each.pair is not pair and each.thread == thread for each in waiting)
        if not may or (captures and not waiting[0].captures):
            self._held.release()
            return False
        self.is_shared = True
        self.allocates()
        return True

    def wait(self, token: object, call: Waiting) -> None:
        """The holder's forward is over: other calls may use what it has not saved."""
        self._waiting[token] = call
        self._held.release()

    def resume(self, token: object, beside: Set[object]) -> bool:
        """Takes the arena for the backward of a waiting call. False if another call has it, or others wait than may.

        Args:
            beside: tokens of the others that may wait.
        """
        if not self._held.acquire(timeout=_BUSY):
            return False
        if not beside >= self.waiting_beside(token):
            self._held.release()
            return False
        self.enter()
        return True

    def leave(self, token: object, *, holds: bool) -> None:
        """Nothing that a waiting call has saved is used any more."""
        self._waiting.pop(token, None)
        if holds or (self._poison and self._held.acquire(False)):
            self.release()

    def enter_beside(self) -> None:
        """`enter` for a waiting call whose backward runs outside of the arena."""
        holds = self._held.acquire(timeout=_BUSY)
        try:
            self.enter()
        finally:
            if holds:
                self._held.release()

    def waiting_beside(self, token: object = None) -> frozenset[object]:
        """The tokens of all calls that wait, but of one."""
        return frozenset(each for each, _ in _calls(self._waiting) if each is not token)

    def owning(self) -> frozenset[object]:
        """The tokens of the waiting calls whose tensors own what they have saved, so that others may allocate."""
        return frozenset(token for token, call in _calls(self._waiting) if call.owns)

    def is_any_waiting(self, pairs: Container[Any], token: object) -> bool:
        """Whether a call of one of these pairs waits, besides that with the token."""
        return any(call.pair in pairs for each, call in _calls(self._waiting) if each is not token)

    def capture_anew(self, needed: int) -> None:
        """Beside waiting calls that are captured, a call has warmed up that needs so many bytes of the arena."""
        if needed >= max(LEAST_SEGMENT, self.nbytes() // _MUCH):
            for _, waiting in _calls(self._waiting):
                if waiting.captures and (call := waiting.call()) is not None:
                    call.capture_anew()

    def allocates(self, token: object = None) -> None:
        """The holder is about to warm up or capture: poisons what the pools may hand out, which is all that no tensors
        own, but what the call with the token has saved."""
        if self._poison:
            waiting = [call for each, call in _calls(self._waiting) if call.owns or each is token]
            _fill(self._pools, self._lent, [tensor for call in waiting for tensor in call.saved()])

    def lend(self, owned: Sequence[Lent], by_replays: Sequence[Lent], thread: int) -> None:
        """Callers have these in its memory when it is released. Only for the holder.

        Args:
            owned: what replays do not lend. The tensors own the memory.
            by_replays: nobody owns their memory between two replays.
            thread: that began the call.
        """
        self._lent += (*owned, *by_replays)
        self._lent_to = thread
        for each in by_replays:
            if each.is_owned:
                each.disown(self.pool(each.device))

    def _take_back(self) -> bool:
        """Ends all loans. Releases the arena and returns False if something is held, or is at another place now."""
        may_use = False
        try:
            if held := self._held_by_callers():
                drop_failed_backwards()
                if held[0].device.type == "cpu" and distributed.is_distributed():
                    distributed.await_gloo(lambda: not self._held_by_callers(), _GLOO)
                held = self._held_by_callers()
            if not held or self._may_move(held):
                may_use = not self._move(held)
            if self._poison and may_use:
                _fill(self._pools, ())
        except Exception:  # too little memory: the call goes on without the arena
            may_use = False
        finally:
            if not may_use:
                self._held.release()
        return may_use

    def _held_by_callers(self) -> list[torch.Tensor]:
        return [tensor for each in self._lent for tensor in each.held()]

    def _may_move(self, held: Sequence[torch.Tensor]) -> bool:
        """Whether nobody knows the addresses: another library, or another thread in the middle of an operator."""
        if self._lent_to != threading.get_ident() and any(t.ident == self._lent_to for t in threading.enumerate()):
            return False
        if (uses := [storage_use_count(storage_id(each)) for each in held]) == self._unmovable:
            return False
        if not are_held_unseen(held):
            return True
        self._unmovable = uses
        self._stop_lending(self._lent)
        return False

    def _move(self, held: Sequence[torch.Tensor]) -> bool:
        """Gives what is held its own memory, and ends all loans. Returns whether anything is at another place now."""
        for pool in {self._pools[tensor.device] for tensor in held}:
            pool.move([tensor for tensor in held if self._pools[tensor.device] is pool])
        moved = [each for each in self._lent if not each.is_in_place()]
        self._lent.clear()
        self._stop_lending(moved)
        self._has_moved |= bool(moved)
        return bool(moved)

    def _stop_lending(self, lent: Sequence[Lent]) -> None:
        for each in lent:
            if (stop_lending := each.stop_lending()) is not None:
                stop_lending()

    def is_held(self) -> bool:
        """Whether a call runs in it, or waits."""
        return self._held.locked() or bool(self._waiting)

    def forget(self, values: Iterable[torch.Tensor], kept: Iterable[torch.Tensor]) -> None:
        """While a call runs: nobody owns the memory of ``values`` any more, but what is ``kept``: it may be reused."""
        if self._poison:
            spared = {tensor.untyped_storage().data_ptr() for tensor in kept}
            for storage in [tensor.untyped_storage() for tensor in values]:
                if storage.data_ptr() not in spared:
                    self._pools[storage.device].forget(storage)

    def pool(self, device: torch.device) -> Pool:
        """The arena's memory on ``device``. Only for the holder."""
        if device not in self._pools:
            self._pools[device] = self._backend.pool(device)
            self._pools[device].enter()
        if nbytes := self.first_segments.pop(device, 0):
            self._pools[device].reserve(nbytes)
        return self._pools[device]

    def enter(self) -> None:
        """Orders the caller's streams after what used the arena before. Only for the holder."""
        for pool in self._pools.values():
            pool.enter()

    def nbytes(self) -> int:
        return sum(pool.nbytes() for pool in self._pools.values())

    def workspaces(self) -> dict[Any, int]:
        """Bytes of the workspaces of libraries that its captures use, outside of the pools; see `Pool.workspaces`."""
        return {where: nbytes for pool in self._pools.values() for where, nbytes in pool.workspaces().items()}

    def trim(self, token: object = None) -> None:
        """Gives back memory that no graph needs, unless calls wait but the one with the token. Only for the holder."""
        if self.waiting_beside(token):
            return
        trimmed = [pool.trim() for pool in self._pools.values()]
        self._has_moved = self._has_moved and not all(trimmed)

    def __del__(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _calls(waiting: Mapping[object, Waiting]) -> list[tuple[object, Waiting]]:
    """Those that wait, the first one first. A destructor may end one meanwhile, whenever anything is allocated."""
    found = ((token, waiting.get(token)) for token in [*waiting])
    return [(token, call) for token, call in found if call is not None]


def _poison_and_release(
    pools: Mapping[torch.device, Pool], held: threading.Lock, lent: Sequence[Lent], waiting: Mapping[object, Waiting]
) -> None:
    try:
        _fill(pools, lent, [tensor for _, call in _calls(waiting) for tensor in call.saved()])
    finally:
        held.release()


def _fill(pools: Mapping[torch.device, Pool], lent: Sequence[Lent], saved: Sequence[torch.Tensor] = ()) -> None:
    """Poisons all pools, but what is lent, and what waiting calls have saved."""
    for device, pool in pools.items():
        pool.poison([*(t for each in lent for t in each.held()), *(t for t in saved if t.device == device)])


@dataclass(slots=True, eq=False, kw_only=True)
class RecordingUse:
    """How much a recording, of a program or of a graphed step, is used, and how much memory that takes.

    Who is discarded for others depends on it.
    """

    nbytes: int = 0  # of the arena, about: recordings of one arena share its memory
    replays: int = 0
    forgotten: float = 0  # of the replays: those that do not count any more
    token: object = field(default_factory=object)  # of calls that replay it: see Note [Shared arenas]

    @property
    def value(self) -> float:
        """How much time it saves for its memory: launches of the host, which graphs save, per byte."""
        saved = sum(sum(graph.counts().values()) for graph in self.graphs())  # in a replay; 0 if that is not known
        return (self.replays - self.forgotten) * max(1, saved) / max(1, self.nbytes)

    def age(self) -> None:
        """Has its replays up to now count by half, so that what was used long ago does not stay for ever."""
        self.forgotten += (self.replays - self.forgotten) / 2

    def arenas(self) -> Sequence[Arena]:
        """Those that its graphs use."""
        raise NotImplementedError

    def graphs(self) -> Iterable[Graph]:
        """Those that a call replays."""
        raise NotImplementedError


class Recorder(Protocol):
    """What owns recordings: a pair of programs, or a graphed step."""

    @property
    def recordings(self) -> Sequence[RecordingUse]:
        """Newest first."""

    def discard_for_budget(self, recording: Any) -> None:
        """Gives up one of its recordings, because others are worth more."""

    def close_recordings(self, *, may_wait: bool) -> None:
        """Destroys graphs that hold a process group, after their work is done if that may be waited for."""


class Arenas:
    """The arenas of one transform, up to a limit for each trace pair: what was split has many calls in flight at once.
    Or those of one graphed step, which has one.

    Pairs keep an arena alive; when the last one that used it is gone, it goes too.

    Note [Scratch arenas]
        Calls of one function that are in flight at a time have an arena each, until their backwards are over. A
        backward may allocate in the arena of its forward: it reuses the memory of saved values that it needs no more,
        and lends its gradients. But what it needs besides, it alone has, although backwards run one after the other. Or
        it allocates in a scratch arena, which it holds only while it runs, so that all backwards share it. Estimates of
        the calls in flight say which of their backwards should, so that all together take the least memory: none where
        one call is in flight at a time, and mostly not the largest.

    Note [Memory budget]
        ``memory_budget=`` bounds the bytes of all pools. Before a call warms up or captures, an estimate of what it
        needs is compared with the budget, and afterwards the bytes of the pools are. Where memory is short, the
        recording that saves the fewest launches per byte is discarded first. Recordings of one arena share its memory,
        which is back when the last one is gone. If nothing can go, the call runs eagerly. So do, for a while, calls of
        a program whose recordings have been discarded many times and replayed few times, since a capture costs more
        than an eager run. A graphed step does the same with its own budget, but its estimate is a lower bound; see Note
        [What a step needs] in step/memory.py.
    """

    def __init__(self, backend: Backend, limit: int, poison: bool, budget: int | float | None = None) -> None:
        self._backend, self._limit, self._poison, self._budget = backend, limit, poison, budget
        self.have_budget = budget is not None
        self._lock = threading.Lock()
        self._budget_lock = threading.RLock()  # what is discarded may run destructors of anybody
        self._arenas: list[weakref.ref[Arena]] = []
        self._scratch: list[weakref.ref[Arena]] = []
        self._pairs: weakref.WeakSet[Recorder] = weakref.WeakSet()

    def join(self, pair: Recorder) -> None:
        """Raises the limit while ``pair`` lives, by what each may have."""
        self._pairs.add(pair)

    def recorders(self) -> list[Recorder]:
        """The pairs, or the step, that have the arenas."""
        return [*self._pairs]

    def hold(
        self,
        preferred: list[Arena],
        call_memory: CallMemory | None,
        join: Callable[[Arena], bool],
        spared: Set[object] | None,
    ) -> Arena | None:
        """Takes a free arena, one of ``preferred`` if possible, or one that the call may share; a new one if there is
        none; None past the limit.

        Args:
            call_memory: of the call. If it holds the arena until its backward, while others are in flight, it leaves
                an arena that is much too large to those, and has a new one.
            join: takes an arena in which other calls wait, if it may.
            spared: see `Arena.try_hold`.
        """
        for arena in preferred:
            if arena.hold(spared=spared):
                return arena
        for arena in alive(self._arenas):
            if join(arena):
                return arena
        is_among_others = call_memory is not None and self.is_another_held()
        needed = call_memory.shared if call_memory and is_among_others else None
        return self._hold_one_of(self._arenas, needed, spared)

    def hold_scratch(self, arena: Arena) -> Arena | None:
        """Takes a scratch arena for a backward; None where it should allocate in ``arena``, which its forward did."""
        in_flight = [
            each.call_memory for each in alive(self._arenas) if each.call_memory is not None and each.is_held()
        ]
        existing = max((scratch.nbytes() for scratch in alive(self._scratch)), default=0)
        if arena.is_shared or arena.call_memory is None or not arena.call_memory.belongs_apart(in_flight, existing):
            return None
        return self._hold_one_of(self._scratch)

    def is_another_held(self, arena: Arena | None = None) -> bool:
        """Whether other calls are in flight than the one that holds ``arena``, or calls at all."""
        return any(each is not arena and each.is_held() for each in alive(self._arenas))

    def are_all_held(self) -> bool:
        """Whether `hold` would find none now."""
        found = alive(self._arenas)
        return len(found) >= self._limit * len(self._pairs) and all(arena.is_held() for arena in found)

    def single(self) -> Arena:
        """The one arena of a graphed step. It is not held, since the step has its own lock around each call."""
        with self._lock:
            found = alive(self._arenas)
            return found[0] if found else self._add(Arena(self._backend, self._poison), self._arenas)

    def _hold_one_of(
        self, arenas: list[weakref.ref[Arena]], needed: int | None = None, spared: Set[object] | None = None
    ) -> Arena | None:
        """The first free one; with ``needed`` bytes the one that fits best, or a new one if that wastes less."""
        with self._lock:
            found = alive(arenas)
            is_full = len(found) >= self._limit * len(self._pairs)
            if needed is not None:
                waste = {arena: abs(arena.nbytes() - needed) for arena in found if not arena.is_held()}
                most = sys.maxsize if is_full else max(needed, _FITS)
                found = sorted((arena for arena in waste if waste[arena] <= most), key=waste.__getitem__)
            for arena in found:
                if arena.hold(spared=spared):
                    return arena
            if is_full:
                return None
            arena = Arena(self._backend, self._poison)
            arena.try_hold()  # before anybody else can find it
            return self._add(arena, arenas)

    @staticmethod
    def _add(arena: Arena, arenas: list[weakref.ref[Arena]]) -> Arena:
        arenas[:] = [weakref.ref(each) for each in (*alive(arenas), arena)]
        return arena

    # See Note [Memory budget].

    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(arena.nbytes() for arena in self._all())

    def budget(self, device: torch.device) -> int | None:
        """The budget in bytes; a share of the device is one of ``device``."""
        if isinstance(self._budget, float):
            return int(self._budget * self._backend.device_nbytes(device))
        return self._budget

    def make_room(
        self,
        mine: Sequence[Arena],
        device: torch.device,
        captures_pay: Callable[[], bool],
        expected: int | None = None,
        kept: RecordingUse | None = None,
    ) -> SkipReason | None:
        """Has the memory that a call uses fit into the budget.

        Args:
            mine: the arenas that the call holds. It allocates in the last one.
            captures_pay: whether it makes sense to discard recordings for one of this call.
            expected: bytes that it will have; None if it has them.
            kept: a recording that is not discarded, since the call adds to it.

        Returns:
            why it does not fit, with both values; None if it does.
        """
        budget = self.budget(device)
        if budget is None:
            return None
        # The capture lock first: a call that begins inside a warm-up holds it already.
        with self._backend.capture_lock, self._budget_lock:
            in_flight = sum(arena.nbytes() for arena in self._all() if arena.is_held() and arena not in mine)
            is_hopeless = expected is not None and in_flight + expected > budget
            problem = "" if is_hopeless else None
            while problem is None and self.nbytes() + max(0, (expected or 0) - mine[-1].nbytes()) > budget:
                if not self._trim_unused(mine):
                    problem = self._discard_least_valuable(mine, captures_pay, kept)
            measured = mine[-1].nbytes()
        if problem is None:
            return None
        needs = (
            f"its memory pool has come to {measured:,}" if expected is None else f"its graphs need about {expected:,}"
        )
        besides = ", besides what other calls still use" if in_flight else ""
        said = f"memory_budget is {budget:,} bytes, and {needs} bytes{besides}{problem}"
        return SkipReason(said, "raise memory_budget")

    def _all(self) -> list[Arena]:
        return alive([*self._arenas, *self._scratch])

    def _discard_least_valuable(
        self, mine: Sequence[Arena], captures_pay: Callable[[], bool], kept: RecordingUse | None
    ) -> str | None:
        """Discards a recording that no other call uses. Returns what to say if none is discarded."""
        recordings = [(pair, recording) for pair in self._pairs for recording in reversed(pair.recordings)]
        candidates = [
            (pair, recording)
            for pair, recording in recordings
            if recording is not kept
            and all(arena in mine or not arena.is_held() for arena in recording.arenas())
            and not any(recording.token in arena.waiting_beside() for arena in recording.arenas())
        ]
        if not candidates:
            return ""
        pays = captures_pay()
        if pays:
            pair, least = min(candidates, key=lambda candidate: candidate[1].value)
            pair.discard_for_budget(least)
        for _, recording in recordings:
            recording.age()
        return None if pays else ", and graphs that would have to go for it have replaced each other too often"

    def _trim_unused(self, mine: Sequence[Arena]) -> bool:
        """Gives back what pools keep that no recording uses. Returns whether there was any."""
        used = {arena for pair in self._pairs for recording in pair.recordings for arena in recording.arenas()}
        before = self.nbytes()
        for arena in self._all():
            if arena not in used and (arena in mine or arena.hold()):
                arena.trim()
                if arena not in mine:
                    arena.release()
        return self.nbytes() < before
