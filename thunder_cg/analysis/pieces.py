"""Where a fuser cuts a trace, so that its collectives overlap with compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.collectives import Movable, Scheduler
from thunder_cg.analysis.ops import Ops

# Bytes of collectives for each piece, and how many pieces there are at most: each is compiled by itself. The last
# reductions have no compute to run beside.
_PIECE, _PIECES = 32 << 20, 16


def compute_in_pieces(ops: Ops, aliasing: Aliasing) -> list[int]:
    """The indices of all ops, compute in as few stretches as still overlap with the collectives.

    For a fuser, which fuses what is next to each other. A stretch makes `_PIECE` bytes of what is reduced, or uses as
    much of what was gathered, and more where that would be more than `_PIECES` stretches. It ends, before it has made
    twice as much, where the next one takes up the fewest bytes: between layers, and not inside of one. Otherwise the
    forward would save for both what one could compute anew.
    """
    return _Pieces(ops, aliasing).run() if aliasing.collectives else [*range(len(ops.ops))]


class _Pieces:
    """Defers collectives and waits of the schedule until there are enough of them."""

    def __init__(self, ops: Ops, aliasing: Aliasing) -> None:
        self._ops, self._aliasing = ops, aliasing
        self._moves = moves = Movable(ops, aliasing)
        self._schedule = Scheduler(moves).run()
        self._sizes = {index: moves.nbytes(index) for index in (*moves.waits, *aliasing.waits)}
        total = sum(self._sizes[index] for index in moves.waits)
        self._piece = max(_PIECE, total // _PIECES)
        self._last_use: dict[str, int] = {}  # of each value that compute makes: the position in the schedule
        for position, index in enumerate(self._schedule[:-1]):
            if index not in self._sizes:
                self._last_use.update(dict.fromkeys(ops.ops[index].names, position))
        for name in ops.args:
            self._last_use.pop(name, None)
        reductions = [position for position, index in enumerate(self._schedule) if self._is_reduction(index)]
        self._last_reduction = max(reductions, default=0)  # its position in the schedule
        self._done: set[int] = set()
        self._order: list[int] = []
        self._made: list[int] = []  # reductions whose inputs are there
        self._start, self._end = 0, -1  # of the stretch, as positions in the schedule; -1 while that is not known

    def run(self) -> list[int]:
        for position, index in enumerate(self._schedule):
            if self._is_reduction(index):
                self._made.append(index)
                if self._end < 0 and self._size(self._made) >= self._piece:
                    self._end = self._best_end(self._start, position, self._size(self._made))
            elif index not in self._sizes:
                needed = self._missing(index)
                if not self._aliasing.waits.isdisjoint(needed):
                    self._end_stretch(position)
                    self._run(self._next_waits())
                self._append(needed)
            if position == self._end:
                self._end_stretch(position + 1)
        return self._order

    def _end_stretch(self, next_one: int) -> None:
        """Runs the reductions that wait for no more compute. The next stretch begins at that position."""
        self._run(each for each in self._made if self._is_ready(each))
        self._made, self._start, self._end = [], next_one, -1

    def _is_reduction(self, index: int) -> bool:
        return index in self._moves.waits and index not in self._moves.ahead

    def _best_end(self, start: int, position: int, size: int) -> int:
        """Where to end the stretch, from this position of the schedule on.

        Args:
            size: of the reductions so far, in bytes.
        """
        crossing: dict[str, int] = {}  # bytes of what the stretch and what comes after it have in common

        def crossing_after(at: int) -> int:
            index = self._schedule[at]
            if index not in self._sizes:
                for name in self._ops.ops[index].names:
                    if self._last_use.get(name, -1) > at:
                        crossing[name] = self._ops.values[name].nbytes
                    else:
                        crossing.pop(name, None)
            return sum(crossing.values())

        for at in range(start, position):
            crossing_after(at)
        best, fewest = position, crossing_after(position)
        for at in range(position + 1, self._last_reduction):
            index, now, following = self._schedule[at], crossing_after(at), self._schedule[at + 1]
            if index in self._aliasing.waits and self._moves.has_use(index):
                break
            if self._is_reduction(index) and (size := size + self._sizes[index]) >= 2 * self._piece:
                break
            if now < fewest and following not in self._moves.early:  # it belongs to what came before
                best, fewest = at, now
        return best

    def _run(self, indices: Iterable[int]) -> None:
        """Appends ops, each after those that it needs."""
        for index in indices:
            self._append(self._missing(index))

    def _append(self, indices: Iterable[int]) -> None:
        new = [index for index in indices if index not in self._done]
        self._done.update(new)
        self._order += new

    def _missing(self, index: int) -> list[int]:
        """What the op needs and has not run, in the order of the trace, and the op itself at the end."""
        missing: set[int] = set()
        waiting = [index]
        while waiting:
            new = self._moves.before[waiting.pop()]
            waiting += (fresh := [other for other in new if other not in self._done and other not in missing])
            missing.update(fresh)
        return [*sorted(missing), index]

    def _is_ready(self, index: int) -> bool:
        """Whether it waits for no compute, but perhaps for collectives and what leads to them."""
        return all(
            other in self._done or ((other in self._sizes or other in self._moves.early) and self._is_ready(other))
            for other in self._moves.before[index]
        )

    def _next_waits(self) -> Iterator[int]:
        """As many as are a piece, those whose results compute needs first."""
        size = 0
        for index in self._schedule:
            if index in self._aliasing.waits and index not in self._done and self._moves.has_use(index):
                if size >= self._piece or not self._is_ready(index):
                    return
                size += self._sizes[index]
                yield index

    def _size(self, indices: Iterable[int]) -> int:
        return sum(self._sizes[index] for index in indices)
