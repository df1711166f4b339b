"""Whether what a program is to warm up or capture fits into the memory budget. See Note [Memory budget]."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_cg.errors import SkipReason
from thunder_cg.runtime.arena import Arenas
from thunder_cg.runtime.call import Call
from thunder_cg.runtime.pair import Pair
from thunder_cg.runtime.region import RuntimeRegion

_FIRST_PAUSE = 16  # calls that run eagerly once one has found no room; the next time twice as many, and so on
_LONGEST_PAUSE = 1024
_MAX_DISCARDED = 8  # recordings in a row for the memory budget, if captures do not pay
_PAYS = 4  # replays for each capture


class ProgramBudget:
    """What one program knows of the memory budget of all arenas.

    Args:
        needed: an estimate of the bytes that the program's graphs need in an arena.

    Attributes:
        needed: that, or more bytes if the graphs turned out to need more.
    """

    def __init__(self, arenas: Arenas, pair: Pair, regions: Sequence[RuntimeRegion], needed: int) -> None:
        self._arenas, self._pair, self._regions = arenas, pair, regions
        self.needed = needed
        self._no_room: SkipReason | None = None  # what the arenas said when they were asked last
        self._ask_again_at = 0  # the number of the first call that asks them again
        self._pause = _FIRST_PAUSE

    def find_room(self, call: Call) -> SkipReason | None:
        """Why what the call is to warm up or capture does not fit. The arenas are not asked each time."""
        if not self._arenas.have_budget:
            return None
        if call.program.counts.calls >= self._ask_again_at:
            self._ask_for_room(call, self.needed)
            call.began_empty = call.memory.nbytes() == 0
        return self._no_room

    def keeps(self, call: Call) -> bool:
        """Whether the arenas keep to the budget, now that the call has warmed up or captured."""
        if not self._arenas.have_budget:
            return True
        self._ask_for_room(call, None)
        if self._no_room is not None and call.began_empty:
            self.needed = max(self.needed, call.memory.nbytes())
            self._ask_again_at = 0  # the next call is compared with what is known now
        return self._no_room is None

    def captures_pay(self) -> bool:
        """Whether it makes sense to discard recordings for one of the program."""
        captures = max((region.stats.captures for region in self._regions), default=0)
        replays = max((region.stats.replays for region in self._regions), default=0)
        return self._pair.discarded < _MAX_DISCARDED or replays >= _PAYS * captures

    def nbytes(self) -> int | None:
        """The budget in bytes of all arenas of the transform. Only for a program with regions."""
        return self._arenas.budget(self._regions[0].device)

    def _ask_for_room(self, call: Call, expected: int | None) -> None:
        self._no_room = self._arenas.make_room(
            call.arenas(), self._regions[0].device, self.captures_pay, expected, call.recording
        )
        if self._no_room is not None:
            self._ask_again_at = call.program.counts.calls + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._pair.discarded = 0
