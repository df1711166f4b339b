"""The votes of ranks: whether all of them capture the collectives of a call, or none.

Note [Agreement of ranks]
    NVIDIA asks that the ranks of a communicator capture and launch its collectives alike. So a region that communicates
    is captured by all ranks of its groups, or by none. Whoever captures in a call puts a vote into the group's store
    and waits for those of the other ranks: once before the capture, once after it. Whoever neither captures nor replays
    puts down why, and waits for nobody. A rank that replays says nothing, so steady calls cost next to nothing. Who
    waits for it, or for a late one, runs eagerly after a while, and asks again at a later call, for half as long after
    each time-out, down to a poll, and for longer once they have agreed. So one rank that differs costs little, and all
    can agree again whenever they do the same.
    Where a call communicates in several groups, a rank votes in one group after the other, in the order in which the
    trace, or the program, has them, and its vote says what it has heard in those before: so in a mesh each rank hears
    of all.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property

from thunder_cg.compat import distributed
from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.errors import RanksDiffer
from thunder_cg.runtime.arena import Recorder
from thunder_cg.runtime.ranks.groups import (
    LATE,
    NEVER,
    NO,
    SETTLED,
    WITHDRAWN,
    CallCounter,
    GroupState,
    Issued,
    Number,
    close_holders,
    counters,
    meeting_counters,
    refusal,
    state_of,
    with_other_ranks,
)

_CAPTURE_TIMEOUT = 10.0  # seconds for that of a rank that captures the same
_LOOK = 0.5  # seconds for a rank that has asked in vain to ask again
_REFUSES = " does not capture it: "  # after a rank, before why
_HAS = " again"  # ends a vote of one that could replay


class Round:
    """The votes of the next call, in each of the groups of several ranks that it communicates in.

    Args:
        asks: whether the other ranks have a say; otherwise the user vouches for them.
        together: in which the call meets other ranks, if those are more groups.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], *, asks: bool = True, together: Sequence[ProcessGroup] | None = None
    ) -> None:
        self._groups = [*groups]  # a state does not hold its group
        states = [state for state in with_other_ranks(groups) if asks and not state.in_capture]
        self._numbers: dict[GroupState, Number] = {state: state.next_call for state in states}
        self._counters = meeting_counters(together or groups)
        self._is_meeting = any(map(CallCounter.meets, self._counters))
        self._has_declined = self._has_agreed = False

    def decline(self, reason: str, *, is_settled: bool = False) -> None:
        """Says that this rank captures nothing in this call; if ``is_settled``, until the ranks meet."""
        self._has_declined = True
        self._put("", (SETTLED if is_settled else NO) + reason)

    def refuse(self, stage: str, reason: str, *, may_pass: bool, is_late: bool = False) -> None:
        """Says that this rank does not go on with ``stage``, and whether it may in a later call.

        Args:
            is_late: whether that is since some rank has not answered in time.
        """
        self._put(stage, (LATE if is_late else NO if may_pass else NEVER) + reason)

    def _put(self, stage: str, vote: str) -> None:
        for state, number in self._numbers.items():
            state.put_vote(number, stage, vote)

    def withdraw(self, groups: Collection[ProcessGroup]) -> None:
        """Takes back what was said in other groups than these: the call does not communicate there, after all."""
        for state, number in self._numbers.items() if self._has_declined else ():
            if state.group not in groups:
                state.put_vote(number, "", WITHDRAWN)

    def ask(self, stage: str, subject: str | Callable[[ProcessGroup], str], *, could_replay: bool = False) -> bool:
        """Votes for ``subject`` at ``stage``, and waits. Returns whether all ranks could replay instead.

        Args:
            subject: describes what is captured, maybe in each group: ranks of a group agree if theirs are equal.

        Raises:
            RanksDiffer: the ranks do not agree.
        """
        all_could = could_replay
        for state, number in self._numbers.items():
            its = subject if isinstance(subject, str) else subject(state.group)
            state.put_vote(number, stage, its + _HAS * all_could)
            try:
                # Once they have agreed, all of them are at the same capture.
                patience = _CAPTURE_TIMEOUT if self._has_agreed else state.patience(self._is_meeting, could_replay)
                all_could &= self._compare(state, number, stage, its, patience)
            except RanksDiffer as problem:
                # For those that still wait, or ask later.
                self.refuse(stage, str(problem), may_pass=problem.may_pass, is_late=problem.no_answer)
                with suppress(RuntimeError):  # the store is gone
                    state.catch_up(number, stage)
                for counter in self._counters if problem.no_answer or problem.needs_meeting else ():
                    counter.ask_for_meeting()
                raise
        for state in self._numbers if not (self._has_agreed or all_could) else ():
            state.note_agreement()
        self._has_agreed = True
        return all_could

    def _compare(self, state: GroupState, number: Number, stage: str, subject: str, patience: float) -> bool:
        """Whether all other ranks could replay; raises `RanksDiffer` unless they vote for ``subject``."""
        deadline, all_could = time.monotonic() + patience, True
        for index, rank in state.other_ranks():
            try:
                vote = state.await_vote(number, stage, index, deadline)
            except RuntimeError as error:
                raise RanksDiffer(f"the store of its group fails: {error}", may_pass=True) from error
            if vote is None:
                state.timeouts += 1
                problem = f"rank {rank} did not answer within {patience:g} s: it replays, or is busy"
                raise RanksDiffer(problem, may_pass=True, no_answer=True)
            if vote.startswith(LATE):  # it has left the call, and shows at its next one whether it counts more
                state.timeouts += 1
                state.await_later_call(number, stage, index, time.monotonic() + min(patience, _LOOK))
            if (refused := refusal(vote)) is not None:
                word, why = refused  # that of a third rank, or of this one at an earlier call, is passed on
                problem = why if why.startswith("rank ") and _REFUSES in why else f"rank {rank}{_REFUSES}{why}"
                raise RanksDiffer(problem, may_pass=word is not NEVER, needs_meeting=word is SETTLED)
            if vote.removesuffix(_HAS) != subject:
                problem = f"rank {rank} captures something else: other collectives, or others together"
                raise RanksDiffer(problem, may_pass=not self._has_agreed)
            all_could &= vote.endswith(_HAS)
        return all_could


class Collectives:
    """The collectives of one program: it takes part in the rounds of their groups, whether it captures them or not.

    Args:
        asks: as in `Round`.
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
        self._issued: Issued = weakref.WeakKeyDictionary()  # before the call under way

    @cached_property
    def _meeting_counters(self) -> Sequence[CallCounter]:
        return meeting_counters(self._together)

    @cached_property
    def _counters(self) -> Sequence[CallCounter]:
        return counters(self._groups, self._together)

    def held_by(self, holder: Recorder) -> None:
        """``holder`` is told before one of the groups goes."""
        distributed.before_shutdown(close_holders)
        for group in self._groups:
            state_of(group).holders.add(holder)

    def are_alive(self) -> bool:
        return all(distributed.is_alive(group) and not state_of(group).is_closed for group in self._groups)

    def meets(self) -> bool:
        """Whether the next call is one of a meeting."""
        return self._asks and any(map(CallCounter.meets, self._meeting_counters))

    def next_round(self) -> Round:
        """To be called once for each call that communicates, before its first collective."""
        opened = Round(self._groups, asks=self._asks, together=self._together)
        self._issued = weakref.WeakKeyDictionary((group, distributed.progress(group)) for group in self._groups)
        for each in self._counters:
            each.count(self._issued)
        return opened

    def count_replay(self) -> None:
        """Counts a call that only replays, which says nothing."""
        for each in self._counters:
            each.count(None)
        self._watch(self._groups)

    def note_launch(self) -> None:
        """A graph with collectives of the call under way was launched."""
        self._issued.clear()
        self._watch(self._groups)
