"""Order the collectives of a trace so that they overlap with compute: issued early, waited for late, few at a time.

All-reduces write what they are given, where nothing else needs it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.dependencies import dependencies
from thunder_cg.analysis.ops import Op, Ops, Value, process_groups, read
from thunder_cg.analysis.rules import executor_rule
from thunder_cg.compat import thunder as compat

# Bytes of gathers that are issued ahead of their first use, and of reductions that nobody has waited for yet. A link of
# 50 GB/s takes more than a millisecond for so much, which hides the launch and latency of the next collective. More
# would only hold more memory: gathered parameters before their use, and the inputs of reductions up to their wait. But
# what one fusion makes or uses is in flight together, while another one runs.
_IN_FLIGHT = 64 << 20
# Bytes of collectives that are coalesced: one launch makes them all. Each launch has a latency of some 20 us, in which
# a link of 400 GB/s moves as much. Larger launches would begin later, so less of them would run beside compute.
_COALESCED = 8 << 20
_GATHERS = frozenset({"torch_all_gather_prim_impl"})
_ALL_REDUCE = "torch_all_reduce_prim_impl"
_REDUCTIONS = frozenset({_ALL_REDUCE, "torch_reduce_scatter_prim_impl"})
_EXCHANGE = "collectives_all_to_all"

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
#
# Note [Coalesced collectives]
# Small collectives of one kind, group and dtype are issued together. A gather moves bits as they are. A reduction sums
# over ranks, and NCCL chooses the order of a sum by the size of a launch. Two numbers have one sum in either order, so
# reductions are coalesced in groups of two ranks only. All ranks coalesce alike, also in calls that run eagerly: what
# is launched together follows from the trace, too. It must not depend on the sizes of activations: `partition` weighs
# its orders by memory only where both launch the same together.


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
    moved = in_order(trace, ops, Scheduler(ops, aliasing).run())
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
    readers = Counter(name for op in ops.ops for name in op.inputs)
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name, alias_set in aliasing.sets.items():
        members[alias_set].append(name)

    def is_needless(op: Op) -> bool:
        if op.id != _ALL_REDUCE or len(op.symbol.args) != 5 or op.symbol.args[3:] != (True, False):
            return False  # it waits, or writes in place
        (given,) = op.inputs
        maker = ops.made_by.get(given)
        if maker is None or maker.index in aliasing.opaque or readers[given] > 1:
            return False
        if maker.is_fusion and not executor_rule(maker.executor).keeps_communicated_apart:
            return False
        shares = (ops.made_by.get(name) for name in members[aliasing.sets[given]] if name != given)
        return all(other is not None and other.index >= op.index for other in shares)

    return [op.index for op in ops.ops if is_needless(op)]


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


class Scheduler:
    """The order in which all ops run.

    A collective whose input is made in the trace is issued right after that. One whose input is there from the start,
    such as a parameter, is issued in the order of first uses, at most `_IN_FLIGHT` bytes ahead. A wait comes right
    before the first use of its result, at the end if there is none, or when more than `_IN_FLIGHT` bytes would wait.
    Collectives that can be `coalesced` are issued one after the other, once they are `_COALESCED` bytes or one of them
    is waited for.
    """

    def __init__(self, ops: Ops, aliasing: Aliasing) -> None:
        self._ops, self._aliasing = ops, aliasing
        self.before = dependencies(ops, aliasing, collectives_in_order=False)
        self._after: list[list[int]] = [[] for _ in self.before]
        for index, earlier in enumerate(self.before):
            for other in earlier:
                self._after[other].append(index)
        users = aliasing.collectives.difference(op.index for op in of_parallelism(ops))
        for first, second in pairwise(sorted(users)):
            self.before[second] = sorted({*self.before[second], first})
        issued = [index for index in sorted(aliasing.collectives) if self._futures(ops.ops[index].outputs)]
        self._issuer = {name: index for index in issued for name in self._futures(ops.ops[index].outputs)}
        self.waits: dict[int, list[int]] = {index: [] for index in issued}  # of each asynchronous collective
        for index in sorted(aliasing.waits):
            for name in ops.ops[index].inputs:
                if name in self._issuer:
                    self.waits[self._issuer[name]].append(index)
        self.early = self._leading_to(issued)
        self._late = self._following_waits()
        self._first_use = self._first_uses()
        self.ahead = self._to_issue_ahead(issued)
        self._missing: dict[int, int] = {}  # for each collective, how many ops it still waits for
        self._unlocks: defaultdict[int, list[int]] = defaultdict(list)
        at_once: defaultdict[tuple[bool, int], int] = defaultdict(int)  # bytes that one op makes ready, or waits for
        for index in issued:
            needed = self._needed(index)
            self._missing[index] = len(needed)
            for other in needed:
                self._unlocks[other].append(index)
            is_ahead = index in self.ahead
            at_once[is_ahead, self._first_use[index] if is_ahead else max(needed, default=0)] += self.nbytes(index)
        self._limit = max([_IN_FLIGHT, *at_once.values()])  # a fusion may make more
        # Collectives to issue, as (first use, index): True for those that are issued ahead, False for the others.
        self._ready: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        # Bytes of what is in flight, oldest first, likewise.
        self._in_flight: dict[bool, dict[int, int]] = {True: {}, False: {}}
        # Collectives that are ready and wait for others to be coalesced with, by kind.
        self._batches: dict[Hashable, list[int]] = {}
        self._done: set[int] = set()
        self._order: list[int] = []
        for index in issued:
            if not self._missing[index]:
                self._make_ready(index)

    def run(self) -> list[int]:
        """The indices of all ops."""
        last = len(self.before) - 1
        for index in range(last):
            if self._ops.ops[index].bookkeeping:
                self._run(index)
            elif index not in self.early and index not in self._late:
                self._issue()
                for other in self.before[index]:
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
        for other in self.before[index]:
            self._run(other)
        self._order.append(index)
        for collective in self._unlocks[index]:
            self._missing[collective] -= 1
            if not self._missing[collective]:
                self._make_ready(collective)
        if self.waits.get(index):
            self._in_flight[index in self.ahead][index] = self.nbytes(index)
        if index in self._aliasing.waits:
            for name in self._ops.ops[index].inputs:
                for flying in self._in_flight.values():
                    flying.pop(self._issuer.get(name, -1), None)

    def _make_ready(self, collective: int) -> None:
        heapq.heappush(self._ready[collective in self.ahead], (self._first_use[collective], collective))

    def _issue(self) -> None:
        """Issues what is ready, as far as the limits allow."""
        while True:
            if self._ready[False]:
                self._add_to_batch(heapq.heappop(self._ready[False])[1])
            elif self._is_behind() and (wait := self._oldest_wait()) is not None:
                self._wait(wait)
            elif self._ready[True] and sum(self._in_flight[True].values()) < self._limit:
                self._run_together(self._next_ahead())
            else:
                return

    def _wait(self, wait: int) -> None:
        """Appends the wait, and the copies of its result, which then needs no memory."""
        self._run(wait)
        for index in self._after[wait]:
            is_copy = self._is_copy_of(index, self._ops.ops[wait].outputs)
            if is_copy and self._done.issuperset(self.before[index]):
                self._run(index)

    def _add_to_batch(self, collective: int) -> None:
        kind = self._kind(collective)
        if kind is None:
            self._run(collective)
            return
        if self._total(self._batches.get(kind, [])) + self.nbytes(collective) > _COALESCED:
            self._run_together(self._batches.pop(kind, []))
        self._batches.setdefault(kind, []).append(collective)

    def _issue_batches(self) -> None:
        while self._batches:
            self._run_together(self._batches.pop(next(iter(self._batches))))

    def _next_ahead(self) -> list[int]:
        """The collective that is used next of those that are issued ahead, with those that it is coalesced with."""
        ready = self._ready[True]
        batch = [heapq.heappop(ready)[1]]
        kind = self._kind(batch[0])
        while kind is not None and ready and self._kind(ready[0][1]) == kind:
            if self._total([*batch, ready[0][1]]) > _COALESCED:
                break
            batch.append(heapq.heappop(ready)[1])
        return batch

    def _run_together(self, collectives: Sequence[int]) -> None:
        """Appends the collectives one after the other, after all that they need."""
        for collective in collectives:
            for other in self.before[collective]:
                self._run(other)
        for collective in collectives:
            self._run(collective)

    def _kind(self, collective: int) -> Hashable:
        return _coalesced_kind(self._ops.ops[collective], self._ops.values)

    def _total(self, collectives: Sequence[int]) -> int:
        return sum(map(self.nbytes, collectives))

    def _is_behind(self) -> bool:
        """Whether reductions hold too much. The one that was issued last stays in flight, however large."""
        behind = self._in_flight[False].values()
        return len(behind) > 1 and sum(behind) > self._limit

    def _oldest_wait(self) -> int | None:
        """The wait for the reduction that has been in flight longest, of those that can be waited for now."""
        waits = (self.waits[collective][0] for collective in self._in_flight[False])
        return next((wait for wait in waits if self._done.issuperset(self.before[wait])), None)

    def _futures(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if self._ops.values[name].kind == "future"]

    def has_use(self, index: int) -> bool:
        """Whether something in the trace computes with what a wait gives."""
        return self._first_use[index] < len(self.before) - 1

    def nbytes(self, index: int) -> int:
        return _nbytes(self._ops.ops[index], self._ops.values)

    def _is_pure(self, index: int) -> bool:
        effects, writes = self._aliasing.effects, self._aliasing.writes
        return not (self._ops.ops[index].bookkeeping or index in effects or writes[index])

    def _leading_to(self, issued: list[int]) -> set[int]:
        """The collectives, and pure ops of one tensor whose results nothing but these collectives needs.

        No other op may compute with the tensor: it and the result would be alive together.
        """
        arguments = set(self._ops.args)
        users: defaultdict[str, list[int]] = defaultdict(list)
        for op in self._ops.ops:
            for name in op.inputs:
                if name not in arguments or not op.bookkeeping:
                    users[name].append(op.index)
        found = set(issued)
        for index in reversed(range(len(self.before))):
            tensors = [name for name in self._ops.ops[index].inputs if name in self._aliasing.sets]
            if len(tensors) != 1 or not self._after[index] or not self._is_pure(index):
                continue
            if found.issuperset([*self._after[index], *(user for user in users[tensors[0]] if user != index)]):
                found.add(index)
        return found

    def _following_waits(self) -> set[int]:
        """Waits, views of nothing but their results, and copies of results to where the user wanted them."""
        found = set(self._aliasing.waits)
        made_late = {name for index in found for name in self._ops.ops[index].outputs}
        for index, before in enumerate(self.before):
            rule = self._ops.ops[index].rule
            is_view = rule is not None and not rule.launches_kernels and self._is_pure(index)
            if self._is_copy_of(index, made_late) or (is_view and before and found.issuperset(before)):
                found.add(index)
                made_late.update(self._ops.ops[index].outputs)
        return found - self.early

    def _is_copy_of(self, index: int, names: Collection[str]) -> bool:
        op = self._ops.ops[index]
        return op.id == "copy_" and op.inputs[0] in names

    def _first_uses(self) -> list[int]:
        """For each op that moves, the first op after it that stays; for each that stays, itself."""
        found = list(range(len(self.before)))
        for index in reversed(found):
            if index in self.early or index in self._late:
                found[index] = min((found[other] for other in self._after[index]), default=len(found))
        return found

    def _to_issue_ahead(self, issued: list[int]) -> set[int]:
        """Collectives that need nothing but arguments, and that something in the trace uses."""
        given: list[bool] = []
        for index, before in enumerate(self.before):
            moves_or_unpacks = index in self.early or self._ops.ops[index].bookkeeping
            given.append(moves_or_unpacks and all(given[other] for other in before))
        return {index for index in issued if given[index] and self._first_use[index] < len(given) - 1}

    def _needed(self, collective: int) -> list[int]:
        """What must have run before the collective and the ops that lead to it can."""
        found: dict[int, None] = {}
        waiting = [collective]
        while waiting:
            for other in self.before[waiting.pop()]:
                if other in self.early and other not in self._missing:
                    waiting.append(other)
                else:
                    found[other] = None
        return list(found)


def coalesced(ops: Sequence[Op], values: Mapping[str, Value]) -> list[list[int]]:
    """The positions of all ops, those of collectives that one launch makes in one list. See the note."""
    launches: list[list[int]] = []
    last: Hashable = None
    total = 0
    for position, op in enumerate(ops):
        kind, nbytes = _coalesced_kind(op, values), _nbytes(op, values)
        if kind is not None and kind == last and total + nbytes <= _COALESCED:
            launches[-1].append(position)
            total += nbytes
        else:
            launches.append([position])
            last, total = kind, nbytes
    return launches


def described(ops: Sequence[Op], values: Mapping[str, Value]) -> str:
    """A hash of what ranks have to launch alike: the collectives, what they take, and which are together.

    All else may differ, such as the size of a batch, and so may the sizes of what an exchange takes and gives.
    """

    def taken(op: Op) -> list[tuple[str, int]]:
        tensors = [values[name] for name in op.inputs if values[name].kind == "tensor"]
        return [(str(value.dtype), 0 if op.id == _EXCHANGE else value.nbytes) for value in tensors]

    launches = [[ops[i] for i in launch if ops[i].communicates] for launch in coalesced(ops, values)]
    said = [[(op.name, taken(op)) for op in launch] for launch in launches if launch]
    return sha256(repr(said).encode()).hexdigest()


def of_parallelism(ops: Ops) -> list[Op]:
    """The collectives of Thunder's own parallelism, which another op waits for; all others are the user's."""
    return [
        op
        for op in ops.ops
        if op.id in _GATHERS | _REDUCTIONS and any(ops.values[name].kind == "future" for name in op.outputs)
    ]


def _coalesced_kind(op: Op, values: Mapping[str, Value]) -> Hashable:
    """What collectives that are coalesced have in common; None for an op that is launched by itself."""
    if op.id not in _GATHERS | _REDUCTIONS or any(values[name].kind != "future" for name in op.outputs):
        return None
    groups = process_groups([op])
    if len(groups) != 1 or (op.id in _REDUCTIONS and groups[0].size() != 2):
        return None
    operators = tuple(leaf for leaf in op.symbol.flat_args if isinstance(leaf, compat.DistributedReduceOps))
    return op.id, groups[0], values[op.outputs[0]].dtype, operators


def _nbytes(op: Op, values: Mapping[str, Value]) -> int:
    """What a collective holds while it is in flight."""
    return max((values[name].nbytes for name in op.names), default=0)
