"""What each op of a trace has to stay behind: what makes its inputs, and what shares memory or effects with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops

# Note [Overlapping arguments]
# Thunder compares only the first addresses of arguments, and no addresses of parameters and buffers, so two of them may
# overlap unnoticed. Where the trace writes one of them, all count as one memory for the order of reads and writes.


def dependencies(ops: Ops, aliasing: Aliasing, *, collectives_in_order: bool = True) -> list[list[int]]:
    """For each op, the ops before it that must stay before it.

    A use stays after the definition. Reads and writes of memory that may be shared keep their order, except reads among
    themselves. Random draws, opaque operators and side effects keep one common order. An opaque operator may see
    arguments, parameters and buffers from outside, so it also keeps its order with writes to them. It may communicate,
    so it keeps its order with collectives; they keep an order of their own. Bookkeeping keeps its order, and the last
    op, the return, comes last. An opaque operator without operands and results, such as the begin of a profiler's
    range, is about the ops around it: these stay on their side of it.

    Args:
        collectives_in_order: False for the one that gives collectives their order, see collectives.py.
    """
    reads, writes, outside = _memory_accesses(ops, aliasing)
    memory = _MemoryOrder(reads, writes)
    effects = _EffectOrder(aliasing, collectives_in_order)
    producer: dict[str, int] = {}
    edges = []
    for index, op in enumerate(ops.ops):
        before = {producer[name] for name in op.inputs if name in producer}
        before |= memory.before(index)
        before |= effects.before(index, op, writes_outside=bool(writes[index] & outside))
        before |= aliasing.effects if op.id == "RETURN" else set()
        producer.update(dict.fromkeys(op.outputs, index))
        edges.append(sorted(before - {-1, index}))
    return edges


def followers(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each op, the ops that must stay after it."""
    after: list[list[int]] = [[] for _ in before]
    for op, earlier in enumerate(before):
        for other in earlier:
            after[other].append(op)
    return after


class _MemoryOrder:
    """Reads and writes of each alias set. It is asked for all ops, in trace order."""

    def __init__(self, reads: Sequence[frozenset[str]], writes: Sequence[frozenset[str]]) -> None:
        self._reads, self._writes = reads, writes
        self._written = {name for names in writes for name in names}
        self._writer: dict[str, int] = {}  # the last one
        self._readers: defaultdict[str, list[int]] = defaultdict(list)  # since then

    def before(self, index: int) -> set[int]:
        read, written = self._reads[index], self._writes[index]
        before = {self._writer[name] for name in read if name in self._writer}
        for name in written:
            before.update(self._readers.pop(name, ()))
            self._writer[name] = index
        for name in (read & self._written) - written:
            self._readers[name].append(index)
        return before


class _EffectOrder:
    """Random draws, side effects, opaque operators, collectives, bookkeeping. It is asked for all ops, in trace order.

    Each number is the index of the last op of its kind, -1 if there is none.
    """

    def __init__(self, aliasing: Aliasing, collectives_in_order: bool) -> None:
        self._aliasing, self._collectives_in_order = aliasing, collectives_in_order
        self._bookkeeping = self._effect = self._opaque = self._barrier = -1
        # Since the last opaque operator:
        self._outside_writers: list[int] = []
        self._communicated: list[int] = []  # the last collective alone, if they are in order

    def before(self, index: int, op: Op, *, writes_outside: bool) -> set[int]:
        before = {self._barrier}
        if op.bookkeeping:
            before.add(self._bookkeeping)
            self._bookkeeping = index
        elif index in self._aliasing.opaque:
            before.update(self._before_opaque(index, op))
        else:
            before.update(self._before_known(index, writes_outside))
        return before

    def _before_opaque(self, index: int, op: Op) -> list[int]:
        before = [self._effect, *self._outside_writers, *self._communicated]
        if not op.inputs and not op.outputs:
            before += range(self._barrier + 1, index)
            self._barrier = index
        self._effect = self._opaque = index
        self._outside_writers, self._communicated = [], []
        return before

    def _before_known(self, index: int, writes_outside: bool) -> list[int]:
        before = []
        if index in self._aliasing.collectives:
            before.append(self._opaque)
            if self._collectives_in_order:
                before += self._communicated
                self._communicated = []
            self._communicated.append(index)
        elif index in self._aliasing.effects and index not in self._aliasing.waits:
            before.append(self._effect)
            self._effect = index
        if writes_outside:
            before.append(self._opaque)
            self._outside_writers.append(index)
        return before


def _memory_accesses(
    ops: Ops, aliasing: Aliasing
) -> tuple[Sequence[frozenset[str]], Sequence[frozenset[str]], set[str]]:
    """The alias sets that each op reads, those that it writes, and those of values from outside."""
    outside = aliasing.sets_of(ops.args)
    if all(outside.isdisjoint(names) for names in aliasing.writes):
        return aliasing.reads, aliasing.writes, outside
    one = min(outside)  # Note [Overlapping arguments]

    def merged(accesses: Sequence[frozenset[str]]) -> list[frozenset[str]]:
        return [frozenset(one if name in outside else name for name in names) for names in accesses]

    return merged(aliasing.reads), merged(aliasing.writes), {one}
