"""What this process knows of its process groups: how calls are numbered there, and what other ranks say of them.

Note [Numbers of calls]
    Ranks make the same collectives in the same order, with or without graphs. So each rank numbers its calls that
    communicate in a group, and calls with equal numbers meet. A call that raises before it communicates gives its
    number to the next one, which meets those that wait for it. It has communicated once PyTorch has issued something,
    or a graph with its collectives was launched.
    A rank may also make what others call by itself, as `Join` does for one without batches, and count less. So whoever
    asks in vain looks where all others are, and waits for one that has given the call up to show that. If one is as
    many calls ahead as it was the last time, this rank counts on from there; from the farthest one, if there are
    several. So all ranks number alike once they have asked in vain a few times, however they differed. If the other
    rank was only early, it counts less then, and hears of it likewise.

Note [Meetings]
    A rank that needs a capture while the others replay would stay eager, and all would wait for it. So it asks for a
    meeting: each rank looks every `_PERIOD` calls whether there is one now. For the next `_MEETING` calls, a rank that
    could replay votes first. If all could, they do. If one needs a capture, all capture: a step in that call, a program
    in its next one, since a backward cannot be captured without its forward. A rank asks for the next meeting after
    twice as many calls, up to `_MAX_PAUSE` periods, since another one may not help either.

Note [Several groups]
    A call may communicate in several groups, as in a mesh of two dimensions. The groups count their calls apart, and
    the ranks of one would not see a meeting of another. So such calls, and those of a forward and a backward that
    communicate in several groups together, are counted once more, and their meetings are in the store of the default
    group.

Note [Keys in the store]
    There may be millions of calls, so each rank has one key for each stage, whatever the call. Its value begins with
    the call's number. No key is deleted: who reads one would wait for it. A group that is made anew may have the name,
    and so the keys, of an old one, so each rank counts in the store how often it has begun with them.

Note [The end of a group]
    NCCL's communicator waits, on its way out, until all graphs that hold it are gone. So before a group is shut down or
    aborted, all recordings that hold it are closed. Calls run eagerly from then on, as they would without graphs.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import NamedTuple, TypeVar

from thunder_cg.compat import distributed
from thunder_cg.compat.distributed import ProcessGroup, Store
from thunder_cg.runtime.arena import Recorder

_logger = logging.getLogger(__name__)

# They begin a vote against a capture, before why. LATE: some rank has not answered in time. SETTLED: it tries again
# only when the ranks meet.
NO, LATE, NEVER, SETTLED = "no: ", "late: ", "never: ", "settled: "
WITHDRAWN = ""  # the vote of a rank that does not communicate in the call, after all
_TIMEOUT, _SHARE = 5.0, 8  # see `GroupState.longest_wait`
_SHORTEST = 0.02  # seconds, after many time-outs in a row
_PERIOD, _MEETING = 256, 32  # calls: see Note [Meetings]
_MAX_PAUSE = 16  # periods
_MEETING_TIMEOUT = 0.5  # seconds
_SILENCE = 10.0  # seconds after which the log says what a rank waits for, and does so again

_Found = TypeVar("_Found")
Number = tuple[int, ...]  # of a call; that of one in a step begins with the step's
# By the time that a call begins: the collectives of PyTorch, by kind of device. Empty once the call has communicated in
# a graph, which PyTorch does not count.
Issued = weakref.WeakKeyDictionary[ProcessGroup, dict[str, int]]


class CallCounter:
    """Numbers calls that communicate, and has ranks meet in some. See Note [Numbers of calls] and Note [Meetings].

    Args:
        group: has the store of the meetings.
        meetings: their key there.

    Attributes:
        step: the number of the step that runs in Python, within which calls are numbered; () outside of steps.
        calls: the number of the last call, within the step.
        meeting: the last call of the meeting that is or was.
        next_request: the call after which this rank may ask for a meeting.
        pause: the periods from then to the request after it.
    """

    def __init__(self, group: ProcessGroup, meetings: str) -> None:
        self._group, self._meetings = weakref.ref(group), meetings
        self.step: Number = ()
        self.calls = 0
        self._issued: Issued | None = None  # before the last call
        self.in_capture = False  # whether calls are in the capture of a step, which communicates nothing
        self.meeting, self.next_request, self.pause = 0, 0, 1

    @property
    def group(self) -> ProcessGroup:
        if (group := self._group()) is None:
            raise RuntimeError("there is no such group any more")
        return group

    @property
    def is_alive(self) -> bool:
        group = self._group()
        return group is not None and distributed.is_alive(group)

    @property
    def next_call(self) -> Number:
        self.end_call()
        return (*self.step, self.calls + 1)

    def end_call(self) -> None:
        """The last call does not count if it has raised before it communicated."""
        before, self._issued = self._issued, None
        if before:
            self.calls -= all(
                issued and distributed.is_alive(group) and distributed.progress(group) == issued
                for group, issued in before.items()
            )

    def count(self, issued: Issued | None) -> None:
        """Begins the next call; ``issued`` is None for one that only replays."""
        self.calls, self._issued = self.next_call[-1], issued
        if self.calls % _PERIOD == 0 and not self.step and self.is_alive:
            with suppress(RuntimeError):  # a store that is gone
                if get(distributed.store(self.group), self.key_of_meeting()) == str(self.calls):
                    self.meeting = self.calls + _MEETING

    @contextmanager
    def within_next_call(self, *, is_capture: bool) -> Iterator[None]:
        """Around a step, or its capture: what communicates in it is numbered within the next call."""
        number = self.next_call
        before = self.calls, self.step, self.in_capture
        self.calls, self.step, self.in_capture = 0, number, self.in_capture or is_capture
        try:
            yield
        finally:
            self.end_call()
            self.calls, self.step, self.in_capture = before

    def meets(self) -> bool:
        """Whether the next call is one of a meeting. Calls in a step are none."""
        self.end_call()
        return self.calls < self.meeting and not self.step

    def ask_for_meeting(self) -> None:
        """After a time-out."""
        self.meeting = 0  # the others are not there
        call = (*self.step, self.calls)[0]
        with suppress(RuntimeError):
            store, key = distributed.store(self.group), self.key_of_meeting()
            if call >= self.next_request and int(get(store, key) or 0) <= call:
                begin = (call // _PERIOD + 2) * _PERIOD  # all ranks will have seen that by then
                store.set(key, str(begin))
                self.next_request, self.pause = begin + self.pause * _PERIOD, min(2 * self.pause, _MAX_PAUSE)

    def key_of_meeting(self) -> str:
        return f"thunder_cg/{state_of(self.group).generation}/{self._meetings}"


class _Ahead(NamedTuple):
    """A rank was at a later call than this one, when this one asked in vain."""

    call: int  # of the other rank
    by: int


class GroupState(CallCounter):
    """What this process knows of one group. Counts the calls that communicate in it."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, "meeting")
        self._ahead: dict[int, _Ahead] = {}  # by rank
        self.timeouts = 0  # since the ranks last agreed, and half of those before
        self.is_closed = False  # whether it has been shut down or aborted
        # See Note [Same options] in same_options.py.
        self.functions = 0  # with Thunder's collectives in it, that have been called
        self.options: str | None = None  # of all of them, on all ranks; None if they differ
        self.holders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self.keep_eager: weakref.WeakSet[object] = weakref.WeakSet()  # programs that no graph is to hold

    @cached_property
    def generation(self) -> int:
        """How many groups with these keys this rank has had: see Note [Keys in the store]."""
        return distributed.store(self.group).add(f"thunder_cg/generation/{self.group.rank()}", 1)

    def longest_wait(self) -> float:
        """How many seconds to wait for another rank at first: it may be in a collective, which waits for this one."""
        return min(_TIMEOUT, distributed.timeout(self.group) / _SHARE)

    def patience(self, is_meeting: bool, could_replay: bool) -> float:
        """How many seconds to wait for votes for a capture, or, if this rank ``could_replay``, against one."""
        if could_replay:  # another rank may not have seen that there is a meeting
            return _MEETING_TIMEOUT
        return max(self.longest_wait() * 0.5**self.timeouts, _MEETING_TIMEOUT if is_meeting else _SHORTEST)

    def other_ranks(self) -> list[tuple[int, int]]:
        """As the group and as the default group number them."""
        group = self.group
        return [(index, rank) for index, rank in enumerate(distributed.ranks(group)) if index != group.rank()]

    def _key(self, number: Number, stage: str, rank: int) -> str:
        """Calls in a step have other keys than the step."""
        return f"thunder_cg/{self.generation}/{len(number)}/{stage}/{rank}"

    def put_vote(self, number: Number, stage: str, vote: str) -> None:
        """Says something of a call at a stage of its capture; of the whole call if that is ""."""
        if self.is_alive:
            with suppress(RuntimeError):  # the store is gone with the rank that had it, and so is who would read it
                key = self._key(number, stage, self.group.rank())
                distributed.store(self.group).set(key, f"{_text(number)} {vote}")

    def _votes(self, number: Number, stage: str, rank: int) -> dict[Number, str]:
        """What another rank has said last, by call: whoever has voted may decline a later call."""
        keys = [self._key(number, each, rank) for each in ("", stage)]
        put = [found.split(" ", 1) for key in keys if (found := get(distributed.store(self.group), key)) is not None]
        return {tuple(map(int, text.split("."))): vote for text, vote in put if vote != WITHDRAWN}

    def _latest_call(self, number: Number, stage: str, rank: int) -> Number:
        """The latest call that another rank has said something of; this one if it has said nothing."""
        return max(self._votes(number, stage, rank), default=number)

    def await_vote(self, number: Number, stage: str, rank: int, deadline: float) -> str | None:
        """What another rank says of the call, which it declines if it is at a later one; None if nothing in time."""

        def look() -> str | None:
            votes, ahead = self._votes(number, stage, rank), self._ahead.get(rank)
            latest = max(votes, default=number)
            if number in votes or latest <= number or (ahead is not None and (ahead.call,) == latest):
                return votes.get(number)  # what it has said of a later call once is no answer to the next one
            now = f"it is at call {_text(latest)} that communicates in the group, and this rank at {_text(number)}"
            _, why = refusal(votes[latest]) or (NO, "")
            return f"{NO}{now}; {f'there, {why}' if why else 'call modules and steps on all ranks alike'}"

        return poll(look, deadline)

    def await_later_call(self, number: Number, stage: str, rank: int, deadline: float) -> None:
        """Waits until another rank is at a later call."""
        poll(lambda: self._latest_call(number, stage, rank) > number or None, deadline)

    def catch_up(self, number: Number, stage: str) -> None:
        """This rank has asked with ``number`` in vain: counts on from where another one is, if it has missed calls.

        Say that it asks with call 5 while rank 1 is at call 7, which may only be early. If it asks with call 9 later,
        and rank 1 is at call 11, rank 1 is two ahead again. So this rank has missed two calls, and its next one is 12.
        """
        if self.step:
            return  # the next step begins to count anew
        at = {rank: self._latest_call(number, stage, rank)[0] for rank, _ in self.other_ranks()}
        ahead = {rank: _Ahead(call, call - number[0]) for rank, call in at.items() if call > number[0]}
        before = {rank: self._ahead.get(rank, now) for rank, now in ahead.items()}
        again = (now.by for rank, now in ahead.items() if now.by == before[rank].by and now.call != before[rank].call)
        missed = max(again, default=0)
        self.calls += missed
        self._ahead = {rank: _Ahead(now.call, now.by - missed) for rank, now in ahead.items()}

    def note_agreement(self) -> None:
        """All other ranks have answered."""
        self.timeouts //= 2
        self._ahead.clear()


_states: weakref.WeakKeyDictionary[ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
_common: weakref.WeakKeyDictionary[ProcessGroup, CallCounter] = weakref.WeakKeyDictionary()


def state_of(group: ProcessGroup) -> GroupState:
    if (state := _states.get(group)) is None:
        state = _states[group] = GroupState(group)
    return state


def with_other_ranks(groups: Iterable[ProcessGroup]) -> list[GroupState]:
    """The groups of several ranks: in any other, this rank has nobody to agree with."""
    return [state_of(group) for group in groups if distributed.has_other_ranks(group)]


def meeting_counters(groups: Sequence[ProcessGroup]) -> Sequence[CallCounter]:
    """What says when calls in these groups meet; nothing if there are no other ranks. See Note [Several groups]."""
    others = with_other_ranks(groups)
    return others if len(others) < 2 else common_counters()


def common_counters() -> list[CallCounter]:
    """That of calls in several groups; none without a default group."""
    known = distributed.default_group()
    world = known() if known is not None else None
    return [] if world is None else [_common.setdefault(world, CallCounter(world, "meeting of several groups"))]


def counters(groups: Iterable[ProcessGroup], together: Sequence[ProcessGroup]) -> list[CallCounter]:
    """All that count a call that communicates in the groups, and that meets other ranks as calls ``together`` do."""
    return [*dict.fromkeys([*map(state_of, groups), *meeting_counters(together)])]


def meets(groups: Sequence[ProcessGroup]) -> bool:
    """Whether the next call that communicates in these groups is one of a meeting."""
    return any(counter.meets() for counter in meeting_counters(groups))


def keep_eager(groups: Sequence[ProcessGroup], program: object) -> None:
    """No graph of a step is to hold collectives of these groups, as long as there is the program."""
    for group in groups:
        state_of(group).keep_eager.add(program)


def close_holders(group: ProcessGroup, *, may_wait: bool) -> None:
    """See Note [The end of a group]."""
    state = state_of(group)
    state.is_closed = True
    for holder in [*state.holders]:
        holder.close_recordings(may_wait=may_wait)


def poll(look: Callable[[], _Found | None], deadline: float, what: str = "") -> _Found | None:
    """What ``look`` finds in a store in time, which is asked again and again; the log says ``what`` is waited for.

    One long wait would keep other threads, such as NCCL's watchdog, from the store.
    """
    begin, pause, next_word = time.monotonic(), 1e-4, _SILENCE
    while (found := look()) is None and (now := time.monotonic()) <= deadline:
        if what and now - begin > next_word:
            _logger.warning("%s for %.0f s now", what, now - begin)
            next_word = 2 * (now - begin)
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    return found


def get(store: Store, key: str) -> str | None:
    """None if nobody has put anything there, which a store would wait for."""
    return store.get(key).decode() if store.check([key]) else None


def refusal(vote: str) -> tuple[str, str] | None:
    """What a vote against a capture begins with, and why; None for one that is for it."""
    return next(((word, vote.removeprefix(word)) for word in (NO, LATE, NEVER, SETTLED) if vote.startswith(word)), None)


def _text(number: Number) -> str:
    return ".".join(map(str, number))
