"""Order the collectives of a trace so that they overlap with compute: issued early, waited for late, few at a time.

All-reduces write what they are given, where nothing else needs it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.coalescing import ALL_REDUCE, coalesced_kind, fit_together, nbytes, of_parallelism
from thunder_cg.analysis.dependencies import dependencies, followers
from thunder_cg.analysis.ops import Op, Ops, read
from thunder_cg.analysis.rules import executor_rule
from thunder_cg.compat import thunder as compat

# Bytes of gathers that are issued ahead of their first use, and of reductions that nobody has waited for yet. A link of
# 50 GB/s takes more than a millisecond for so much, which hides the launch and latency of the next collective. More
# would only hold more memory: gathered parameters before their use, and the inputs of reductions up to their wait. But
# what one fusion makes or uses is in flight together, while another one runs.
_IN_FLIGHT = 64 << 20

# Note [Order of collectives]
# All ranks must issue the same collectives in the same order. They have the same trace, and the order follows from the
# positions of ops in it and from sizes of tensors alone: nothing here iterates over a set or compares names. There is
# one order for all groups: with one for each, two ranks that share two groups could wait for each other.
#
# A collective on its own stream starts when all work that was issued before it is done. So what can run beside an op
# must be issued before the op. Ops that only lead to one collective, such as the division by the number of ranks, move
# with it. All other ops keep their order. So no value lives longer than in the trace as it was, in which all gathers
# come first and all reductions last, except what a collective holds while it is in flight, which is bounded.
#
# The user's own collectives keep their order, and each has a launch of its own: another rank may make them in Python,
# where Dynamo has given up compiling.
#
# Where a forward writes an argument, as batch norm does, all arguments count as one memory. Gathers then stay before
# the first such write, and waits on their side of each.


def schedule_collectives(trace: compat.TraceCtx) -> compat.TraceCtx:
    """The trace with its asynchronous collectives and their waits moved, and without needless copies of what they take.

    Args:
        trace: a forward or backward trace, as ``transform_trace_post_optimization`` gets it.
    """
    outputs = (proxy for symbol in trace.bound_symbols for proxy in symbol.flat_proxy_outs)
    if not any(isinstance(proxy, compat.FutureTensorProxy) for proxy in outputs):
        return trace
    ops = read(trace)
    aliasing = Aliasing.of(ops)
    order = waits_before_writes(ops, aliasing)
    if order != sorted(order):
        ops = read(trace := in_order(trace, ops, order))
        aliasing = Aliasing.of(ops)
    moved = in_order(trace, ops, Scheduler(Movable(ops, aliasing)).run())
    copies = {id(ops.ops[index].symbol) for index in needless_copies(ops, aliasing)}
    moved.bound_symbols = [_in_place(each) if id(each) in copies else each for each in moved.bound_symbols]
    scheduled = compat.del_last_used(moved)
    scheduled.set_provenance(compat.TraceProvenance("Schedule of collectives"))
    return scheduled


def in_order(trace: compat.TraceCtx, ops: Ops, order: list[int]) -> compat.TraceCtx:
    """The trace with its symbols in the order of these indices of ops, which were read from it."""
    moved = compat.from_trace(trace)
    moved.bound_symbols = [ops.ops[index].symbol for index in order]
    return moved


def needless_copies(ops: Ops, aliasing: Aliasing) -> list[int]:
    """The indices of all-reduces that copy what they are given, and could write it instead.

    Thunder (0.2.6) has them copy where `ddp` is applied to what `thunder.jit` returns: one kernel for each gradient.
    They need no copy of what an op has made that nothing else reads and that shares memory with nothing. Of a fusion,
    only its executor knows that: two results may be one tensor.
    """
    copying = [op for op in ops.ops if op.id == ALL_REDUCE and _copies(op.symbol)]
    if not copying:
        return []
    readers = Counter(name for op in ops.ops for name in op.inputs)
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name, alias_set in aliasing.sets.items():
        members[alias_set].append(name)

    def is_needless(op: Op) -> bool:
        (gradient,) = op.inputs
        maker = ops.made_by.get(gradient)
        if maker is None or maker.index in aliasing.opaque or readers[gradient] > 1:
            return False
        if maker.is_fusion and not executor_rule(maker.executor).keeps_reduced_apart:
            return False
        shares = (ops.made_by.get(name) for name in members[aliasing.sets[gradient]] if name != gradient)
        return all(other is not None and other.index >= op.index for other in shares)

    return [op.index for op in copying if is_needless(op)]


def _copies(all_reduce: compat.BoundSymbol) -> bool:
    """Whether it returns a future (``do_async``), of a copy (no ``skip_clone``)."""
    return len(all_reduce.args) == 5 and all_reduce.args[3:] == (True, False)


def _in_place(all_reduce: compat.BoundSymbol) -> compat.BoundSymbol:
    return all_reduce.from_bsym(args=(*all_reduce.args[:-1], True))  # skip_clone


def waits_before_writes(ops: Ops, aliasing: Aliasing) -> list[int]:
    """The indices of all ops, each wait before the first write of what its collective still uses.

    Thunder (0.2.6) moves waits down, also past such a write; the ranks would then race.
    """
    order: dict[int, None] = {}
    waits = {name: index for index in aliasing.waits for name in ops.ops[index].inputs}
    in_flight: dict[int, frozenset[str]] = {}  # waits, and the memory that their collectives use
    for op in ops.ops:
        order |= dict.fromkeys(w for w, used in in_flight.items() if not used.isdisjoint(aliasing.writes[op.index]))
        order[op.index] = None
        if op.index in aliasing.collectives:
            used = aliasing.reads[op.index] | aliasing.writes[op.index]
            in_flight.update((waits[name], used) for name in op.outputs if name in waits)
        in_flight = {wait: used for wait, used in in_flight.items() if wait not in order}
    return [*order]


class Movable:
    """Which ops of a trace move: collectives, what leads to them, and their waits. All other ops keep their order.

    Attributes:
        before: for each op, those that have to come before it.
        after: for each op, those that have to come after it.
        waits: for each asynchronous collective, its waits.
        early: these collectives, and what leads to nothing else, such as a division by the number of ranks.
        late: waits, views of their results, and copies of these to where the user wanted them.
        first_use: for each op that moves, the first op after it that stays; for each that stays, itself.
        ahead: collectives that need nothing but arguments, such as parameters, and that something in the trace uses.
    """

    def __init__(self, ops: Ops, aliasing: Aliasing) -> None:
        self.ops, self.aliasing = ops, aliasing
        self.before = dependencies(ops, aliasing, collectives_in_order=False)
        self.after = followers(self.before)
        users = aliasing.collectives.difference(op.index for op in of_parallelism(ops))
        for first, second in pairwise(sorted(users)):
            self.before[second] = sorted({*self.before[second], first})
        futures = {
            name: index
            for index in sorted(aliasing.collectives)
            for name in ops.ops[index].outputs
            if ops.values[name].kind == "future"
        }
        self.waits: dict[int, list[int]] = {index: [] for index in futures.values()}
        self.waited = {  # the collectives that each wait waits for
            index: [futures[name] for name in ops.ops[index].inputs if name in futures]
            for index in sorted(aliasing.waits)
        }
        for wait, collectives in self.waited.items():
            for collective in collectives:
                self.waits[collective].append(wait)
        self.early = self._leading_to_collectives()
        self.late = self._following_waits()
        self.first_use = self._first_uses()
        self.ahead = self._of_arguments()

    def has_use(self, index: int) -> bool:
        """Whether something in the trace computes with what a collective, or a wait, gives."""
        return self.first_use[index] < len(self.before) - 1

    def nbytes(self, index: int) -> int:
        return nbytes(self.ops.ops[index], self.ops.values)

    def is_copy_of(self, index: int, names: Collection[str]) -> bool:
        op = self.ops.ops[index]
        return op.id == "copy_" and op.inputs[0] in names

    def needed(self, collective: int) -> list[int]:
        """What must have run before the collective and the ops that lead to it can."""
        indices: dict[int, None] = {}
        waiting = [collective]
        while waiting:
            for other in self.before[waiting.pop()]:
                if other in self.early and other not in self.waits:
                    waiting.append(other)
                else:
                    indices[other] = None
        return list(indices)

    def _is_pure(self, index: int) -> bool:
        effects, writes = self.aliasing.effects, self.aliasing.writes
        return not (self.ops.ops[index].bookkeeping or index in effects or writes[index])

    def _leading_to_collectives(self) -> set[int]:
        """The collectives, and pure ops of one tensor whose results nothing but these collectives needs.

        No other op may compute with the tensor: it and the result would be alive together.
        """
        arguments = set(self.ops.args)
        users: defaultdict[str, list[int]] = defaultdict(list)
        for op in self.ops.ops:
            for name in op.inputs:
                if name not in arguments or not op.bookkeeping:
                    users[name].append(op.index)
        leading = set(self.waits)
        for index in reversed(range(len(self.before))):
            tensors = [name for name in self.ops.ops[index].inputs if name in self.aliasing.sets]
            if len(tensors) != 1 or not self.after[index] or not self._is_pure(index):
                continue
            if leading.issuperset([*self.after[index], *(user for user in users[tensors[0]] if user != index)]):
                leading.add(index)
        return leading

    def _following_waits(self) -> set[int]:
        following = set(self.aliasing.waits)
        made_late = {name for index in following for name in self.ops.ops[index].outputs}
        for index, before in enumerate(self.before):
            rule = self.ops.ops[index].rule
            is_view = rule is not None and not rule.launches_kernels and self._is_pure(index)
            if self.is_copy_of(index, made_late) or (is_view and before and following.issuperset(before)):
                following.add(index)
                made_late.update(self.ops.ops[index].outputs)
        return following - self.early

    def _first_uses(self) -> list[int]:
        first_uses = list(range(len(self.before)))
        for index in reversed(first_uses):
            if index in self.early or index in self.late:
                first_uses[index] = min((first_uses[other] for other in self.after[index]), default=len(first_uses))
        return first_uses

    def _of_arguments(self) -> set[int]:
        needs_only_arguments: list[bool] = []
        for index, before in enumerate(self.before):
            moves_or_unpacks = index in self.early or self.ops.ops[index].bookkeeping
            needs_only_arguments.append(moves_or_unpacks and all(needs_only_arguments[other] for other in before))
        return {index for index in self.waits if needs_only_arguments[index] and self.has_use(index)}


@dataclass
class _Queue:
    """Collectives that are to be issued, and those that are in flight.

    Attributes:
        ready: those that can be issued, as a heap of first uses and indices.
        in_flight: bytes of those that nobody has waited for, oldest first.
    """

    ready: list[tuple[int, int]] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)

    def nbytes(self) -> int:
        return sum(self.in_flight.values())


class Scheduler:
    """The order in which all ops run.

    A collective whose input is made in the trace is issued right after that. One whose input is there from the start,
    such as a parameter, is issued in the order of first uses, at most `_IN_FLIGHT` bytes ahead. A wait comes right
    before the first use of its result, at the end if there is none, or when more than `_IN_FLIGHT` bytes would wait.
    Collectives that can be `coalesced` are issued one after the other, once no more would `fit_together` or one of them
    is waited for.
    """

    def __init__(self, moves: Movable) -> None:
        self._moves, self._ops = moves, moves.ops
        self._ahead, self._made = _Queue(), _Queue()  # of what is given, and of what the trace makes
        needed = {collective: moves.needed(collective) for collective in moves.waits}
        self._limit = self._bytes_in_flight(needed)
        self._missing = {collective: len(others) for collective, others in needed.items()}  # how many it waits for
        self._unlocks: defaultdict[int, list[int]] = defaultdict(list)
        for collective, others in needed.items():
            for other in others:
                self._unlocks[other].append(collective)
        # Collectives that are ready and wait for others to be coalesced with, by kind.
        self._batches: dict[Hashable, list[int]] = {}
        self._done: set[int] = set()
        self._order: list[int] = []
        for collective, missing in self._missing.items():
            if not missing:
                self._make_ready(collective)

    def _bytes_in_flight(self, needed: Mapping[int, Sequence[int]]) -> int:
        """The limit: more where one op, such as a fusion, makes the inputs of more, or uses more."""
        moves, at_once = self._moves, Counter[tuple[bool, int]]()
        for collective, others in needed.items():
            is_ahead = collective in moves.ahead
            op = moves.first_use[collective] if is_ahead else max(others, default=0)
            at_once[is_ahead, op] += moves.nbytes(collective)
        return max([_IN_FLIGHT, *at_once.values()])

    def run(self) -> list[int]:
        """The indices of all ops."""
        moves = self._moves
        last = len(moves.before) - 1
        for index in range(last):
            if self._ops.ops[index].bookkeeping:
                self._run(index)
            elif index not in moves.early and index not in moves.late:
                self._issue()
                for other in moves.before[index]:
                    self._run(other)
                self._issue()  # the waits above made room, and what is issued now runs beside this op
                self._run(index)
        self._issue()
        self._issue_batches()
        while (wait := self._oldest_wait()) is not None:
            self._wait(wait)
            self._issue()
            self._issue_batches()
        for index in range(last + 1):
            self._run(index)
        return self._order

    def _run(self, index: int) -> None:
        """Appends the op, after those that it depends on. All of these come earlier in the trace."""
        if index in self._done:
            return
        for kind, batch in self._batches.items():
            if index in batch:
                self._run_together(self._batches.pop(kind))
                return
        self._done.add(index)
        for other in self._moves.before[index]:
            self._run(other)
        self._order.append(index)
        for collective in self._unlocks[index]:
            self._missing[collective] -= 1
            if not self._missing[collective]:
                self._make_ready(collective)
        if self._moves.waits.get(index):
            self._queue(index).in_flight[index] = self._moves.nbytes(index)
        for collective in self._moves.waited.get(index, ()):
            self._queue(collective).in_flight.pop(collective, None)

    def _queue(self, collective: int) -> _Queue:
        return self._ahead if collective in self._moves.ahead else self._made

    def _make_ready(self, collective: int) -> None:
        heapq.heappush(self._queue(collective).ready, (self._moves.first_use[collective], collective))

    def _issue(self) -> None:
        """Issues what is ready, as far as the limits allow."""
        while True:
            if self._made.ready:
                self._add_to_batch(heapq.heappop(self._made.ready)[1])
            elif self._is_behind() and (wait := self._oldest_wait()) is not None:
                self._wait(wait)
            elif self._ahead.ready and self._ahead.nbytes() < self._limit:
                self._run_together(self._next_ahead())
            else:
                return

    def _wait(self, wait: int) -> None:
        """Appends the wait, and the copies of its result, which then needs no memory."""
        self._run(wait)
        for index in self._moves.after[wait]:
            is_copy = self._moves.is_copy_of(index, self._ops.ops[wait].outputs)
            if is_copy and self._done.issuperset(self._moves.before[index]):
                self._run(index)

    def _add_to_batch(self, collective: int) -> None:
        kind = self._kind(collective)
        if kind is None:
            self._run(collective)
            return
        if not self._fit([*self._batches.get(kind, ()), collective]):
            self._run_together(self._batches.pop(kind, []))
        self._batches.setdefault(kind, []).append(collective)

    def _issue_batches(self) -> None:
        while self._batches:
            self._run_together(self._batches.pop(next(iter(self._batches))))

    def _next_ahead(self) -> list[int]:
        """The collective that is used next of those that are issued ahead, with those that it is coalesced with."""
        ready = self._ahead.ready
        batch = [heapq.heappop(ready)[1]]
        kind = self._kind(batch[0])
        while kind is not None and ready and self._kind(ready[0][1]) == kind and self._fit([*batch, ready[0][1]]):
            batch.append(heapq.heappop(ready)[1])
        return batch

    def _run_together(self, collectives: Sequence[int]) -> None:
        """Appends the collectives one after the other, after all that they need."""
        for collective in collectives:
            for other in self._moves.before[collective]:
                self._run(other)
        for collective in collectives:
            self._run(collective)

    def _kind(self, collective: int) -> Hashable:
        return coalesced_kind(self._ops.ops[collective], self._ops.values)

    def _fit(self, collectives: Sequence[int]) -> bool:
        return fit_together(map(self._moves.nbytes, collectives))

    def _is_behind(self) -> bool:
        """Whether reductions hold too much. The one that was issued last stays in flight, however large."""
        return len(self._made.in_flight) > 1 and self._made.nbytes() > self._limit

    def _oldest_wait(self) -> int | None:
        """The wait for the reduction that has been in flight longest, of those that can be waited for now."""
        waits = (self._moves.waits[collective][0] for collective in self._made.in_flight)
        return next((wait for wait in waits if self._done.issuperset(self._moves.before[wait])), None)
