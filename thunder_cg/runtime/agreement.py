"""What the ranks of process groups agree on before they capture collectives, and what goes before a group does.

Note [Agreement of ranks]
    NVIDIA asks that the ranks of a communicator capture and launch its collectives alike. So a region that communicates
    is captured by all ranks of its groups, or by none. Ranks make the same collectives in the same order, with or
    without graphs. So each rank numbers its calls that communicate in a group, and calls with equal numbers meet.
    Whoever captures in such a call puts a vote into the group's store and waits for those of the other ranks: once
    before the capture, once after it. Whoever neither captures nor replays puts down why, and waits for nobody. A rank
    that replays says nothing, so steady calls cost next to nothing. Who waits for it, or for a late one, runs eagerly
    after a while, and asks again at a later call, for half as long after each time-out, down to a poll, and for longer
    once they have agreed. So one rank that differs costs little, and all can agree again whenever they do the same.
    A call that raises before it communicates gives its number to the next one, which meets those that wait for it. It
    has communicated once PyTorch has issued something, or a graph with its collectives was launched. A rank may also
    make what others call by itself, as `Join` does for one without batches, and count less. So whoever asks in vain
    looks where all others are, and waits for one that has given the call up to show that. If one is as many calls ahead
    as it was the last time, this rank counts on from there; from the farthest one, if there are several. So all ranks
    number alike once they have asked in vain a few times, however they differed. If the other rank was only early, it
    counts less then, and hears of it likewise.

Note [Meetings]
    A rank that needs a capture while the others replay would stay eager, and all would wait for it. So it asks for a
    meeting: each rank looks every `_PERIOD` calls whether there is one now. For the next `_MEETING` calls, a rank that
    could replay votes first. If all could, they do. If one needs a capture, all capture: a step in that call, a program
    in its next one, since a backward cannot be captured without its forward. A rank asks for the next meeting after
    twice as many calls, up to `_MAX_PAUSE` periods, since another one may not help either.

Note [Several groups]
    A call may communicate in several groups, as in a mesh of two dimensions. It is captured by all ranks of all these
    groups, or by none. So a rank votes in one group after the other, in the order in which the trace, or the program,
    has them, and its vote says what it has heard in those before: so in a mesh each rank hears of all. The groups count
    their calls apart, and the ranks of one would not see a meeting of another. So such calls, and those of a forward
    and a backward that communicate in several groups together, are counted once more, and their meetings are in the
    store of the default group.

Note [Keys in the store]
    There may be millions of calls, so each rank has one key for each stage, whatever the call. Its value begins with
    the call's number. No key is deleted: who reads one would wait for it. A group that is made anew may have the name,
    and so the keys, of an old one, so each rank counts in the store how often it has begun with them.

Note [Steps that communicate]
    A step, whose whole graph holds its collectives, is one call in each of its groups, whatever is in it. What runs in
    it in Python is numbered within it. So ranks number alike, whether they replay the step or run it. Which groups it
    communicates in shows when it runs in Python: each group counts what PyTorch issues, and what programs do in it.

Note [Same options]
    The order of the collectives of Thunder's parallelism, and which of them one launch makes, follow from the trace,
    from the executors and from options. Ranks that differ there would mix up their tensors, and NCCL may not notice. So
    when a function first has such collectives in a group, each rank puts its options into the group's store, and
    compares those of all others. The functions of a group are numbered in the order in which they first do so, which is
    that of all ranks. A rank waits for the others as long as a collective does: they may be late, and one that has
    compiled without the transform, and has Thunder's order, never answers. But a rank may compile anew what the others
    go on with. If all functions up to then have had its options on all ranks, so has what they run. So it waits for
    `_longest` only, says that it is alone, and does not count the function, as the others do not. Later versions of a
    function, for other shapes, ask nothing. The user's own collectives keep their order and have launches of their own,
    with any options.

Note [The end of a group]
    NCCL's communicator waits, on its way out, until all graphs that hold it are gone. So before a group is shut down or
    aborted, all recordings that hold it are closed. Calls run eagerly from then on, as they would without graphs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TypeVar

from thunder_cg.compat import distributed
from thunder_cg.compat.distributed import ProcessGroup, Store
from thunder_cg.errors import OptionsDiffer, RanksDiffer
from thunder_cg.runtime.arena import Recorder
from thunder_cg.runtime.skip_reasons import GROUP_IS_GONE

_logger = logging.getLogger(__name__)

_TIMEOUT, _SHARE = 5.0, 8  # see `_longest`
_CAPTURE_TIMEOUT = 10.0  # for that of a rank that captures the same
_SHORTEST = 0.02  # after many time-outs in a row
_PERIOD, _MEETING = 256, 32  # calls: see Note [Meetings]
_MAX_PAUSE = 16  # periods
_MEETING_TIMEOUT = 0.5  # seconds
_LOOK = 0.5  # seconds for a rank that has asked in vain to ask again
_SILENCE = 10.0  # seconds after which the log says what a rank waits for, and does so again
_NO, _LATE, _NEVER, _NOTHING = "no: ", "late: ", "never: ", ""  # _LATE: some rank has not answered in time
_REFUSES = " does not capture it: "  # after a rank, before why
_HAS = " again"  # ends a vote of one that could replay
_ALONE = "alone: "  # begins the options of a function that only this rank has compiled


_Found = TypeVar("_Found")
_Number = tuple[int, ...]  # of a call; that of one in a step begins with the step's
# By the time that a call begins: the collectives of PyTorch, by kind of device. Empty once the call has communicated in
# a graph, which PyTorch does not count.
_Issued = weakref.WeakKeyDictionary[ProcessGroup, dict[str, int]]


class _Clock:
    """Numbers the calls that communicate in a group, and has ranks meet in some of them. See Note [Meetings].

    Args:
        group: has the store of the meetings.
        meetings: their key there.
    """

    def __init__(self, group: ProcessGroup, meetings: str) -> None:
        self._group, self._meetings = weakref.ref(group), meetings
        self.place: _Number = ()  # the call that its calls are numbered within
        self.calls = 0  # that communicate in it
        self.before: _Issued | None = None  # the last of them
        self.is_captured = False  # whether they are in the capture of a step, and so are none
        self.meeting = 0  # the last call of the meeting that is or was
        self.next_request, self.pause = 0, 1  # the call after which this rank may ask for a meeting, and periods then

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
    def next_call(self) -> _Number:
        self.end_call()
        return (*self.place, self.calls + 1)

    def end_call(self) -> None:
        """The last call is none if it has raised before it communicated."""
        before, self.before = self.before, None
        if before:
            self.calls -= all(
                issued and distributed.is_alive(group) and distributed.progress(group) == issued
                for group, issued in before.items()
            )

    def count(self, before: _Issued | None) -> None:
        self.calls, self.before = self.next_call[-1], before
        if self.calls % _PERIOD == 0 and not self.place and self.is_alive:
            with suppress(RuntimeError):  # a store that is gone
                if _get(distributed.store(self.group), self.key_of_meeting()) == str(self.calls):
                    self.meeting = self.calls + _MEETING

    def meets(self) -> bool:
        """Whether the next call is one of a meeting. Calls in a step are none."""
        self.end_call()
        return self.calls < self.meeting and not self.place

    def ask_for_meeting(self) -> None:
        """After a time-out."""
        self.meeting = 0  # the others are not there
        call = (*self.place, self.calls)[0]
        with suppress(RuntimeError):
            store, key = distributed.store(self.group), self.key_of_meeting()
            if call >= self.next_request and int(_get(store, key) or 0) <= call:
                begin = (call // _PERIOD + 2) * _PERIOD  # all ranks will have seen that by then
                store.set(key, str(begin))
                self.next_request, self.pause = begin + self.pause * _PERIOD, min(2 * self.pause, _MAX_PAUSE)

    def key_of_meeting(self) -> str:
        return f"thunder_cg/{_state(self.group).generation}/{self._meetings}"


class _GroupState(_Clock):
    """What this process knows of one group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, "meeting")
        self.ahead: dict[int, tuple[int, int]] = {}  # by rank: the later call that it was at, and by how many
        self.timeouts = 0  # since the ranks last agreed, and half of those before
        self.is_closed = False  # whether it has been shut down or aborted
        # See Note [Same options].
        self.functions = 0  # with Thunder's collectives in it, that have been called
        self.options: str | None = None  # of all of them, on all ranks; None if they differ
        self.holders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self.keep_eager: weakref.WeakSet[object] = weakref.WeakSet()  # programs that no graph is to hold

    @cached_property
    def generation(self) -> int:
        """How many groups with these keys this rank has had: see Note [Keys in the store]."""
        return distributed.store(self.group).add(f"thunder_cg/generation/{self.group.rank()}", 1)

    def other_ranks(self) -> list[tuple[int, int]]:
        """As the group and as the default group number them."""
        group = self.group
        return [(index, rank) for index, rank in enumerate(distributed.ranks(group)) if index != group.rank()]

    def key(self, number: _Number, stage: str, rank: int) -> str:
        """Calls in a step have other keys than the step."""
        return f"thunder_cg/{self.generation}/{len(number)}/{stage}/{rank}"

    def put(self, number: _Number, stage: str, vote: str) -> None:
        if self.is_alive:
            with suppress(RuntimeError):  # the store is gone with the rank that had it, and so is who would read it
                key = self.key(number, stage, self.group.rank())
                distributed.store(self.group).set(key, f"{_text(number)} {vote}")

    def said(self, number: _Number, stage: str, rank: int) -> dict[_Number, str]:
        """What another rank has said last, by call: whoever has voted may decline a later call."""
        keys = [self.key(number, each, rank) for each in ("", stage)]
        put = [found.split(" ", 1) for key in keys if (found := _get(distributed.store(self.group), key)) is not None]
        return {tuple(map(int, text.split("."))): vote for text, vote in put if vote != _NOTHING}

    def latest(self, number: _Number, stage: str, rank: int) -> _Number:
        """The latest call that another rank has said something of; this one if it has said nothing."""
        return max(self.said(number, stage, rank), default=number)

    def await_next(self, number: _Number, stage: str, rank: int, deadline: float) -> None:
        """Waits until another rank is at a later call."""
        _awaited(lambda: self.latest(number, stage, rank) > number or None, deadline)

    def vote(self, number: _Number, stage: str, rank: int, deadline: float) -> str | None:
        """What another rank says of the call, which it declines if it is at a later one; None if nothing in time."""

        def look() -> str | None:
            said, known = self.said(number, stage, rank), self.ahead.get(rank)
            latest = max(said, default=number)
            if number in said or latest <= number or (known is not None and known[:1] == latest):
                return said.get(number)  # what it has said of a later call once is no answer to the next one
            now = f"it is at call {_text(latest)} that communicates in the group, and this rank at {_text(number)}"
            return f"{_NO}{now}; call modules and steps on all ranks alike"

        return _awaited(look, deadline)

    def catch_up(self, number: _Number, stage: str) -> None:
        """This rank has asked with ``number`` in vain: counts on from where another one is, if it has missed calls.

        Say that it asks with call 5 while rank 1 is at call 7, which may only be early. If it asks with call 9 later,
        and rank 1 is at call 11, rank 1 is two ahead again. So this rank has missed two calls, and its next one is 12.
        """
        if self.place:
            return  # the next step begins to count anew
        counts_on, later = 0, {}
        for rank, _ in self.other_ranks():
            (call,) = self.latest(number, stage, rank)
            if (by := call - number[0]) > 0:
                known, was_by = self.ahead.get(rank, (call, by))
                if known != call and was_by == by:
                    counts_on = max(counts_on, by)
                later[rank] = call, by
        self.calls += counts_on
        self.ahead = {rank: (call, by - counts_on) for rank, (call, by) in later.items()}


_states: weakref.WeakKeyDictionary[ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()
_common: weakref.WeakKeyDictionary[ProcessGroup, _Clock] = weakref.WeakKeyDictionary()  # see Note [Several groups]


def _state(group: ProcessGroup) -> _GroupState:
    if (state := _states.get(group)) is None:
        state = _states[group] = _GroupState(group)
    return state


def _close_holders(group: ProcessGroup, *, may_wait: bool) -> None:
    state = _state(group)
    state.is_closed = True
    for holder in [*state.holders]:
        holder.close_recordings(may_wait=may_wait)


class Round:
    """The votes of the next call, in each of the groups of several ranks that it communicates in.

    Args:
        asks: whether the other ranks have a say; otherwise the user vouches for them.
        together: in which the call meets other ranks, if those are more groups.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], *, asks: bool, together: Sequence[ProcessGroup] | None = None
    ) -> None:
        self._groups = [*groups]  # a state does not hold its group
        states = [state for state in _with_others(groups) if asks and not state.is_captured]
        self._numbers = {state: state.next_call for state in states}
        self._clocks = _clocks(together or groups)
        self._is_meeting = any(map(_Clock.meets, self._clocks))
        self._has_declined = self._has_agreed = False

    def decline(self, reason: str) -> None:
        """Says that this rank captures nothing in this call."""
        self._has_declined = True
        self._put("", _NO + reason)

    def refuse(self, stage: str, reason: str, *, may_pass: bool, is_late: bool = False) -> None:
        """Says that this rank does not go on with ``stage``, and whether it may in a later call.

        Args:
            is_late: whether that is since some rank has not answered in time.
        """
        self._put(stage, (_LATE if is_late else _NO if may_pass else _NEVER) + reason)

    def _put(self, stage: str, vote: str) -> None:
        for state, number in self._numbers.items():
            state.put(number, stage, vote)

    def withdraw(self, groups: Collection[ProcessGroup]) -> None:
        """Takes back what was said in other groups than these: the call does not communicate there, after all."""
        for state, number in self._numbers.items() if self._has_declined else ():
            if state.group not in groups:
                state.put(number, "", _NOTHING)

    def ask(self, stage: str, subject: str | Mapping[ProcessGroup, str], *, could_replay: bool = False) -> bool:
        """Votes for ``subject`` at ``stage``, and waits. Returns whether all ranks could replay instead.

        Args:
            subject: describes what is captured, maybe in each group: ranks of a group agree if theirs are equal.

        Raises:
            RanksDiffer: the ranks do not agree.
        """
        all_could = could_replay
        for state, number in self._numbers.items():
            its = subject if isinstance(subject, str) else subject[state.group]
            state.put(number, stage, its + _HAS * all_could)
            try:
                patience = self._patience(state, could_replay=could_replay)
                all_could &= self._compare(state, number, stage, its, patience)
            except RanksDiffer as problem:
                # For those that still wait, or ask later.
                self.refuse(stage, str(problem), may_pass=problem.may_pass, is_late=problem.no_answer)
                with suppress(RuntimeError):  # the store is gone
                    state.catch_up(number, stage)
                for clock in self._clocks if problem.no_answer else ():
                    clock.ask_for_meeting()
                raise
        for state in self._numbers if not (self._has_agreed or all_could) else ():
            state.timeouts //= 2  # the others are there again
            state.ahead.clear()
        self._has_agreed = True
        return all_could

    def _patience(self, state: _GroupState, *, could_replay: bool) -> float:
        """How many seconds to wait for votes."""
        if self._has_agreed:  # so all of them are at the same capture
            return _CAPTURE_TIMEOUT
        if could_replay:  # another rank may not have seen that there is a meeting
            return _MEETING_TIMEOUT
        shortest = _MEETING_TIMEOUT if self._is_meeting else _SHORTEST
        return max(_longest(state.group) * 0.5**state.timeouts, shortest)

    def _compare(self, state: _GroupState, number: _Number, stage: str, subject: str, patience: float) -> bool:
        """Whether all other ranks could replay; raises `RanksDiffer` unless they vote for ``subject``."""
        deadline, all_could = time.monotonic() + patience, True
        for index, rank in state.other_ranks():
            try:
                vote = state.vote(number, stage, index, deadline)
            except RuntimeError as error:
                raise RanksDiffer(f"the store of its group fails: {error}", may_pass=True) from error
            if vote is None:
                state.timeouts += 1
                problem = f"rank {rank} did not answer within {patience:g} s: it replays, or is busy"
                raise RanksDiffer(problem, may_pass=True, no_answer=True)
            if vote.startswith(_LATE):  # it has left the call, and shows at its next one whether it counts more
                state.timeouts += 1
                state.await_next(number, stage, index, time.monotonic() + min(patience, _LOOK))
            for word in (_NO, _LATE, _NEVER):
                if vote.startswith(word):
                    why = vote.removeprefix(word)  # of a third rank, or of this one at an earlier call, is passed on
                    problem = why if _REFUSES in why else f"rank {rank}{_REFUSES}{why}"
                    raise RanksDiffer(problem, may_pass=word is not _NEVER)
            if vote.removesuffix(_HAS) != subject:
                problem = f"rank {rank} captures something else: other collectives, or others together"
                raise RanksDiffer(problem, may_pass=not self._has_agreed)
            all_could &= vote.endswith(_HAS)
        return all_could


def _longest(group: ProcessGroup) -> float:
    """How many seconds to wait for another rank at first: it may be in a collective, which waits for this one."""
    return min(_TIMEOUT, distributed.timeout(group) / _SHARE)


def _text(number: _Number) -> str:
    return ".".join(map(str, number))


def _get(store: Store, key: str) -> str | None:
    """None if nobody has put anything there, which a store would wait for."""
    return store.get(key).decode() if store.check([key]) else None


def meets(groups: Sequence[ProcessGroup]) -> bool:
    """Whether the next call that communicates in these groups is one of a meeting."""
    return any(map(_Clock.meets, _clocks(groups)))


def _clocks(groups: Sequence[ProcessGroup]) -> Sequence[_Clock]:
    """What says when calls in these groups meet; nothing if there are no other ranks. See Note [Several groups]."""
    others = _with_others(groups)
    return others if len(others) < 2 else _common_clocks()


def _common_clocks() -> list[_Clock]:
    """That of calls in several groups; none without a default group."""
    known = distributed.default_group()
    world = known() if known is not None else None
    return [] if world is None else [_common.setdefault(world, _Clock(world, "meeting of several groups"))]


def _with_others(groups: Iterable[ProcessGroup]) -> list[_GroupState]:
    """The groups of several ranks: in any other, this rank has nobody to agree with."""
    return [_state(group) for group in groups if distributed.has_other_ranks(group)]


def _counted(groups: Iterable[ProcessGroup], clocks: Sequence[_Clock]) -> list[_Clock]:
    """What counts a call that communicates in the groups, and that meets others by these clocks."""
    return [*dict.fromkeys([*map(_state, groups), *clocks])]


def _awaited(look: Callable[[], _Found | None], deadline: float, what: str = "") -> _Found | None:
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


class Collectives:
    """The collectives of one program: it takes part in the rounds of their groups, whether it captures them or not.

    Args:
        watch: is told the groups after each replay.
        together: those of the program, and of one that is captured together with it.
    """

    def __init__(
        self,
        groups: Sequence[ProcessGroup],
        *,
        asks: bool,
        watch: Callable[[Sequence[ProcessGroup]], None],
        together: Sequence[ProcessGroup] | None = None,
    ) -> None:
        self._groups, self._asks, self._watch = list(groups), asks, watch
        self._together = groups if together is None else together
        self._before: _Issued = weakref.WeakKeyDictionary()  # the call under way

    @cached_property
    def _clocks(self) -> Sequence[_Clock]:
        return _clocks(self._together)

    @cached_property
    def _counted(self) -> Sequence[_Clock]:
        return _counted(self._groups, self._clocks)

    def held_by(self, holder: Recorder) -> None:
        """``holder`` is told before one of the groups goes."""
        distributed.before_shutdown(_close_holders)
        for group in self._groups:
            _state(group).holders.add(holder)

    def are_alive(self) -> bool:
        return all(distributed.is_alive(group) and not _state(group).is_closed for group in self._groups)

    def meets(self) -> bool:
        """Whether the next call is one of a meeting."""
        return self._asks and any(map(_Clock.meets, self._clocks))

    def next_round(self) -> Round:
        """To be called once for each call that communicates, before its first collective."""
        opened = Round(self._groups, asks=self._asks, together=self._together)
        issued = ((group, distributed.progress(group)) for group in self._groups)
        self._before = weakref.WeakKeyDictionary(issued)
        for each in self._counted:
            each.count(self._before)
        return opened

    def count_replay(self) -> None:
        """Counts a call that only replays, which says nothing."""
        for each in self._counted:
            each.count(None)
        self._watch(self._groups)

    def note_launch(self) -> None:
        """A graph with collectives of the call under way was launched."""
        self._before.clear()
        self._watch(self._groups)


_functions: weakref.WeakKeyDictionary[object, weakref.WeakKeyDictionary[ProcessGroup, str]]
_functions = weakref.WeakKeyDictionary()  # for each group of Thunder's collectives, how the options of ranks differ


class SameOptions:
    """Whether all ranks have compiled a function with the same options. See Note [Same options].

    Args:
        groups: of Thunder's collectives in a version of the function.
        function: stands for it, for all its versions.
        options: those that count, by name.
        waits: whether it matters on this rank, or other ranks only hear of its options.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], function: object, options: Mapping[str, str], *, waits: bool
    ) -> None:
        self._groups, self._options, self._waits = list(groups), dict(options), waits
        self._checked = _functions.setdefault(function, weakref.WeakKeyDictionary())

    def check(self, label: str) -> None:
        """To be called before the version communicates.

        Raises:
            OptionsDiffer: those of another rank are other ones, or it has said nothing until the group's time-out.
        """
        for state in _with_others(filter(distributed.is_alive, self._groups)):
            if state.group not in self._checked:
                self._checked[state.group] = self._compare(state, label)
            if self._checked[state.group]:
                raise OptionsDiffer(label, self._checked[state.group])

    def _compare(self, state: _GroupState, label: str) -> str:
        """Tells the other ranks the options; in which rank's they differ, and how, "" if in none."""
        group, said = state.group, json.dumps(self._options)
        store, key = distributed.store(group), f"thunder_cg/{state.generation}/options/{state.functions + 1}"
        store.set(f"{key}/{group.rank()}", said)
        are_usual, is_alone, problems = state.options == said, False, []
        limit = _longest(group) if are_usual else distributed.timeout(group)
        deadline = time.monotonic() + limit
        for index, rank in state.other_ranks() if self._waits else ():
            what = f"{label}: waits for rank {rank}, which has to run it, compiled with the same options,"
            put = _awaited(partial(_options_of, store, f"{key}/{index}", said), deadline, what)
            if put is None and not are_usual:
                problem = "has run no function that was compiled with the transform and communicates"
                problems.append(f"rank {rank} {problem}, in {limit:g} s")
            elif put is None or put.startswith(_ALONE):
                is_alone = True
            else:
                theirs = json.loads(put)
                differ = [name for name, value in self._options.items() if theirs.get(name) != value]
                problems += [f"rank {rank} has {name}={theirs.get(name)}, not {self._options[name]}" for name in differ]
        if is_alone and not problems:
            store.set(f"{key}/{group.rank()}", _ALONE + said)
        else:
            state.options = said if not problems and (are_usual or not state.functions) else None
            state.functions += 1
        return "; ".join(problems)


def _options_of(store: Store, key: str, mine: str) -> str | None:
    """What another rank has said; None if it has said nothing, or has other options in a function of its own."""
    put = _get(store, key)
    return None if put is not None and put.startswith(_ALONE) and put != _ALONE + mine else put


def keep_eager(groups: Sequence[ProcessGroup], program: object) -> None:
    """No graph of a step is to hold collectives of these groups, as long as there is the program."""
    for group in groups:
        _state(group).keep_eager.add(program)


class StepCall:
    """What a call of a step communicates in: see Note [Steps that communicate].

    Attributes:
        groups: oldest first.
        objection: why no graph of the step is to hold that, with the fix; and whether another thread may have done it.
    """

    def __init__(self, device_type: str = "", before: Sequence[tuple[ProcessGroup, Mapping[str, int]]] = ()) -> None:
        self._device_type, self._before = device_type, before
        self.groups: list[ProcessGroup] = []
        self.objection: tuple[str, bool] | None = None

    def look(self) -> None:
        """Finds what it has communicated in by now."""
        self.groups = []
        for group, progress in self._before:
            now = distributed.progress(group) if distributed.is_alive(group) else {}
            kinds = {kind for kind, count in now.items() if count != progress.get(kind, 0)}
            _state(group).end_call()
            if _state(group).calls or kinds:
                self.groups.append(group)
                self.objection = self.objection or _objection(group, kinds, self._device_type)


_runs_a_step = threading.RLock()


@contextmanager
def call_of_step(device_type: str, votes: Round | None = None, *, is_capture: bool = False) -> Iterator[StepCall]:
    """Around a step that runs in Python, or that is captured: all that communicates in it is one call of each group.

    Args:
        device_type: of the graphs.
        votes: what this rank has said of the call.
        is_capture: then nothing has been communicated, so nothing counts.
    """
    groups = distributed.groups()
    if not groups:
        yield StepCall()
        return
    if not _runs_a_step.acquire(blocking=False):
        yield (call := StepCall())
        call.objection = "another thread runs a step, so it is not known what this one communicates", True
        return
    states = [*map(_state, groups), *_common_clocks()]
    call = StepCall(device_type, [(group, distributed.progress(group)) for group in groups])
    numbers = [state.next_call for state in states]
    before = [(state.place, state.calls, state.is_captured) for state in states]
    for state, number in zip(states, numbers):
        state.place, state.calls, state.is_captured = number, 0, state.is_captured or is_capture
    try:
        yield call
    finally:
        call.look()
        for state, (place, calls, is_captured) in zip(states, before):
            state.end_call()
            state.place, state.calls, state.is_captured = place, calls, is_captured
        for each in _counted(call.groups, _clocks(call.groups)) if not is_capture else ():
            each.count(None)
        if votes is not None:
            votes.withdraw(call.groups)
        _runs_a_step.release()


def _objection(group: ProcessGroup, kinds: Set[str], device_type: str) -> tuple[str, bool] | None:
    """As `StepCall.objection`, to what has been communicated in a group, on these kinds of devices."""
    if _state(group).is_closed:
        return GROUP_IS_GONE.problem, False
    if _state(group).keep_eager:
        problem = 'a module that communicates in the same group was compiled with capture_collectives="never"'
        return f"{problem}; compile it without that option", False
    if "cpu" in kinds and device_type != "cpu":  # as gloo does, on behalf of a GPU, too
        return f"it communicates on the CPU, and its graph is on {device_type}; do that outside of the step", True
    if (found := distributed.capture_problem(group, device_type)) is not None:
        return "; ".join(found), False
    return None
