"""Order a trace's ops into the fewest regions that its dependencies allow.

Everything is linear in ops and dependencies, up to sorting.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from thunder_cg.analysis import rules
from thunder_cg.analysis.aliasing import alias_sets, has_effect, is_opaque, reads, writes
from thunder_cg.analysis.classify import Verdict
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.rules import Reason

__all__ = ["Eager", "Plan", "Region", "dependencies", "partition"]

_PEAK_GROWTH = 1.10
"""Regrouping may raise the estimated peak memory by this factor over trace order, no further."""

_PEAK_SLACK = 2 << 20
"""As many bytes more never matter: torch's caching allocator asks the device for no smaller segment."""

_FEWEST_KERNELS = 2
"""A graph of one kernel launches no faster than the kernel."""


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that are captured together."""

    ops: tuple[int, ...]
    """Indices into the trace's ops, in trace order."""
    device: str
    split: str
    """Why it ended where it did; empty if nothing follows."""


@dataclass(frozen=True, slots=True)
class Eager:
    """An op that runs as it does without this package."""

    op: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs, in this order. Every op of the trace is in exactly one step."""

    steps: tuple[Region | Eager, ...]
    verdicts: tuple[Verdict, ...]
    """One per op; those of regions that turned out too small say so."""


def partition(ops: Ops, verdicts: Sequence[Verdict]) -> Plan:
    """Orders ``ops`` so that those to capture form the fewest regions.

    The fewest means: on each device, no order that respects `dependencies` has fewer (with several devices, nearly so:
    exact would be a search). Among the orders with as few, ops stay as close to trace order as they can. Trace order
    itself is kept where regrouping would raise the estimated peak memory by more than a tenth.
    """
    graph = _Graph.of(ops, verdicts)
    memory = _Memory.of(ops, graph)
    in_order = _runs(range(len(ops.ops)), graph.colors)
    runs = _runs(graph.schedule(), graph.colors)
    before, after = memory.peak(in_order), memory.peak(runs)
    if after <= max(before * _PEAK_GROWTH, before + _PEAK_SLACK):
        return _plan(ops, verdicts, graph, runs, "")
    note = f"kept in trace order: regrouping would raise the estimated peak memory from {before:,} to {after:,} bytes"
    return _plan(ops, verdicts, graph, in_order, note if len(in_order) > len(runs) else "")


# ----------------------------------------------------------------------------------------------------------------------
# Dependencies
# ----------------------------------------------------------------------------------------------------------------------

# Note [Overlapping arguments]
# Thunder tells aliased arguments only by their first address, and parameters and buffers not at all, so two of them may
# overlap unnoticed. Where the trace writes one, all count as one memory for the order of reads and writes.


def dependencies(ops: Ops) -> list[list[int]]:
    """For each op, the ops before it that must stay before it.

    Uses stay after definitions; reads and writes of memory that may be shared keep their order, reads among
    themselves excepted; random draws, opaque operators, collectives and side effects keep theirs, all in one; an
    opaque operator also keeps its place among writes to arguments, parameters and buffers, which it may see from
    outside. The trace's frame keeps its order, and its last op, the return, comes last.
    """
    return _dependencies(ops, alias_sets(ops))


def _dependencies(ops: Ops, root: Mapping[str, str]) -> list[list[int]]:
    wrote = [writes(op, root) for op in ops.ops]
    outside = {root[name] for name in ops.args if name in root}
    if not outside.isdisjoint(name for names in wrote for name in names):  # Note [Overlapping arguments]
        one = min(outside)
        root = {name: one if of in outside else of for name, of in root.items()}
        outside, wrote = {one}, [writes(op, root) for op in ops.ops]
    written = {name for names in wrote for name in names}
    producer: dict[str, int] = {}
    writer: dict[str, int] = {}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    effect = frame = opaque = -1
    outside_writers: list[int] = []
    found = []
    for index, op in enumerate(ops.ops):
        before = {producer[name] for name in op.inputs if name in producer}
        touched, mine = reads(op, root), wrote[index]
        before.update(writer[name] for name in touched if name in writer)
        for name in mine:
            before.update(readers.pop(name, ()))
            writer[name] = index
        for name in (touched & written) - mine:
            readers[name].append(index)
        if op.bookkeeping:
            before.add(frame)
            frame = index
        elif is_opaque(op):
            before.update((effect, *outside_writers))
            effect = opaque = index
            outside_writers = []
        else:
            if has_effect(op):
                before.add(effect)
                effect = index
            if mine & outside:
                before.add(opaque)
                outside_writers.append(index)
        producer.update(dict.fromkeys(op.outputs, index))
        found.append(sorted(before - {-1, index}))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Schedule
# ----------------------------------------------------------------------------------------------------------------------

# Note [Time]
# A schedule is a sequence of groups, each on one device, with a slot for eager ops before, between and after them.
# Group g (from 1) has time 2g, the slot after it 2g + 1, the first slot 1. An op's time is at least that of each op
# before it, and ops of equal time run in trace order, so times are all that a schedule is.


@dataclass(frozen=True, slots=True)
class _Graph:
    """Ops as the scheduler sees them."""

    before: list[list[int]]
    after: list[list[int]]
    colors: list[str | None]
    """The device of an op to capture; None for eager ones."""
    root: Mapping[str, str]

    @classmethod
    def of(cls, ops: Ops, verdicts: Sequence[Verdict]) -> _Graph:
        root = alias_sets(ops)
        before = _dependencies(ops, root)
        after: list[list[int]] = [[] for _ in before]
        for op, earlier in enumerate(before):
            for other in earlier:
                after[other].append(op)
        return cls(before, after, [v.device if v.capture else None for v in verdicts], root)

    def schedule(self) -> list[int]:
        """A time for each op: as close to trace order as the fewest groups allow."""
        groups = _groups(self)
        at: defaultdict[str, list[int]] = defaultdict(list)
        for position, device in enumerate(groups, start=1):
            at[device].append(2 * position)
        earliest = self._earliest(at)
        latest = self._latest(at, end=2 * len(groups) + 1)
        now = 0
        times = []
        for op, color in enumerate(self.colors):
            # Not before what came earlier in the trace, unless a region would have to wait for it. Whatever depends
            # on an op has no smaller latest time than it, so this never puts an op before one that it depends on.
            time = _not_before(max(earliest[op], min(now, latest[op])), color, at)
            now = max(now, time)
            times.append(time)
        return times

    def _earliest(self, at: Mapping[str, list[int]]) -> list[int]:
        times: list[int] = []
        for op, color in enumerate(self.colors):
            times.append(_not_before(max((times[other] for other in self.before[op]), default=1), color, at))
        return times

    def _latest(self, at: Mapping[str, list[int]], end: int) -> list[int]:
        times = [end] * len(self.colors)
        for op in reversed(range(len(self.colors))):
            color = self.colors[op]
            bound = min((times[other] for other in self.after[op]), default=end)
            if color is None:
                times[op] = bound - 1 + bound % 2
            else:
                times[op] = at[color][bisect.bisect_right(at[color], bound) - 1]
        return times


def _not_before(time: int, color: str | None, at: Mapping[str, list[int]]) -> int:
    """The first time from ``time`` on at which an op of this color can run."""
    if color is None:
        return time + 1 - time % 2
    return at[color][bisect.bisect_left(at[color], time)]


def _groups(graph: _Graph) -> list[str]:
    """The devices of the groups, in order.

    Runs all eager ops that are ready, then all ops of one device that are, and so on. With one device nothing beats
    this: whatever any other order has run before its k-th group ends, this has run too. With several, a device waits
    until everything that can be in its group is ready, unless all of them wait.
    """
    waiting = [len(earlier) for earlier in graph.before]
    ready: dict[str | None, list[int]] = defaultdict(list)
    for op, count in enumerate(waiting):
        if not count:
            ready[graph.colors[op]].append(op)
    fronts = [_Front.of(graph, device) for device in dict.fromkeys(c for c in graph.colors if c is not None)]

    def run(color: str | None) -> None:
        stack = ready[color]
        while stack:
            op = stack.pop()
            for front in fronts:
                front.ran(op)
            for later in graph.after[op]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready[graph.colors[later]].append(later)

    order: list[str] = []
    run(None)
    while candidates := [front for front in fronts if ready[front.device]]:
        whole = (front for front in candidates if front.is_whole())
        chosen = next(whole, None) or max(candidates, key=lambda front: len(ready[front.device]))
        run(chosen.device)
        order.append(chosen.device)
        run(None)
    return order


class _Front:
    """How far one device is: its ops by level, the number of groups of the device that an op needs up to itself."""

    def __init__(self, graph: _Graph, device: str, levels: list[int]) -> None:
        self.graph, self.device, self.levels = graph, device, levels
        mine = [op for op, color in enumerate(graph.colors) if color == device]
        self.left = Counter(levels[op] for op in mine)
        self.foreign = Counter(levels[op] for op in mine for other in graph.before[op] if graph.colors[other] != device)
        self.level, self.deepest = 1, max(self.left)

    @classmethod
    def of(cls, graph: _Graph, device: str) -> _Front:
        levels: list[int] = []
        for op, color in enumerate(graph.colors):
            own = color == device
            needed = (levels[other] + (own and graph.colors[other] != device) for other in graph.before[op])
            levels.append(max((int(own), *needed)))
        return cls(graph, device, levels)

    def ran(self, op: int) -> None:
        if self.graph.colors[op] == self.device:
            self.left[self.levels[op]] -= 1
            return
        for later in self.graph.after[op]:
            if self.graph.colors[later] == self.device:
                self.foreign[self.levels[later]] -= 1

    def is_whole(self) -> bool:
        """Does no op of the current level wait for anything but ops of this device?"""
        while not self.left[self.level] and self.level < self.deepest:
            self.level += 1
        return not self.foreign[self.level]


def _runs(times: Sequence[int], colors: Sequence[str | None]) -> list[tuple[str | None, list[int]]]:
    """Ops by time, then in trace order; neighbours of one device together."""
    runs: list[tuple[str | None, list[int]]] = []
    for op in sorted(range(len(times)), key=times.__getitem__):
        if runs and runs[-1][0] == colors[op]:
            runs[-1][1].append(op)
        else:
            runs.append((colors[op], [op]))
    return [(color, sorted(members)) for color, members in runs]


# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    """What each op allocates on the captured devices, by root, and what it needs."""

    allocates: list[dict[str, int]]
    touches: list[frozenset[str]]
    start: dict[str, int]
    """Tensors from outside that the call can free: not parameters, not buffers."""
    kept: frozenset[str]
    """Returned or saved: alive to the end."""

    @classmethod
    def of(cls, ops: Ops, graph: _Graph) -> _Memory:
        root, captured = graph.root, set(graph.colors)
        size = {name: v.nbytes if v.device in captured else 0 for name, v in ops.values.items()}
        outside = [name for name in ops.args if name in root]
        start: dict[str, int] = {}
        for name in outside:
            if not ops.values[name].static:
                start[root[name]] = max(start.get(root[name], 0), size[name])
        known = {root[name] for name in outside}
        allocates = []
        for op in ops.ops:
            fresh: dict[str, int] = {}
            taken = {root[name] for name in op.inputs if name in root}
            for name in op.outputs:
                if name in root and root[name] not in taken and root[name] not in known:
                    fresh[root[name]] = max(fresh.get(root[name], 0), size[name])
            allocates.append(fresh)
        ends = (name for op in ops.ops if op.id == "RETURN" for name in op.inputs)
        return cls(
            allocates,
            [reads(op, root) for op in ops.ops],
            start,
            frozenset(root[name] for name in ends if name in root),
        )

    def peak(self, runs: Iterable[tuple[str | None, list[int]]]) -> int:
        """Bytes alive at once, at most, if ops run in this order and memory is freed after its last use."""
        order = [op for _, members in runs for op in members]
        last = {name: position for position, op in enumerate(order) for name in self.touches[op]}
        size = dict(self.start)
        alive = peak = sum(size.values())
        for position, op in enumerate(order):
            for name, nbytes in self.allocates[op].items():
                size[name] = size.get(name, 0) + nbytes
                alive += nbytes
            peak = max(peak, alive)
            for name in self.touches[op]:
                if last[name] == position and name not in self.kept:
                    alive -= size.pop(name, 0)
        return peak


# ----------------------------------------------------------------------------------------------------------------------
# Plan
# ----------------------------------------------------------------------------------------------------------------------


def _plan(
    ops: Ops,
    verdicts: Sequence[Verdict],
    graph: _Graph,
    runs: list[tuple[str | None, list[int]]],
    note: str,
) -> Plan:
    final = list(verdicts)
    steps: list[Region | Eager] = []
    for color, members in runs:
        if color is None:
            steps.extend(Eager(op) for op in members)
        elif (kernels := sum(_kernels(ops.ops[op], verdicts[op]) for op in members)) < _FEWEST_KERNELS:
            steps.extend(Eager(op) for op in members)
            for op in members:
                final[op] = _too_small(final[op], kernels)
        else:
            steps.append(Region(tuple(members), color, ""))
    splits = _splits(ops, final, graph, steps, note)
    return Plan(
        tuple(replace(s, split=splits[i]) if isinstance(s, Region) else s for i, s in enumerate(steps)), tuple(final)
    )


def _kernels(op: Op, verdict: Verdict) -> int:
    """A lower bound of what the op launches, views and allocations not counted.

    A fusion counts as what is inside of it: it may be one kernel, but calling it costs more than launching several.
    """
    if verdict.reason is Reason.USER_ALLOW:
        return _FEWEST_KERNELS
    if op.is_fusion:
        return max(1, sum(_kernels(sub, verdict) for sub in op.subs))
    return int(rules.find(op.executor, op.id) not in rules.KERNEL_FREE)


def _too_small(verdict: Verdict, kernels: int) -> Verdict:
    found = "only views" if kernels == 0 else "one kernel"
    detail = f"alone between eager operators or devices: {found}, and a graph of fewer than two launches no faster"
    fix = "allow or remove the eager operators around it, and it joins the region before or after them"
    return replace(verdict, capture=False, reason=Reason.TOO_SMALL, detail=detail, fix=fix)


def _splits(
    ops: Ops, verdicts: Sequence[Verdict], graph: _Graph, steps: Sequence[Region | Eager], note: str
) -> dict[int, str]:
    """For each region's step, why it ended there."""
    following: dict[str, int] = {}
    splits: dict[int, str] = {}
    for at in reversed(range(len(steps))):
        step = steps[at]
        if not isinstance(step, Region):
            continue
        end = following.get(step.device, len(steps))
        blocking = _blocking(ops, graph, steps, at, end)
        text = "; ".join(_named(ops.ops[op], verdicts[op]) for op in blocking[:3])
        if len(blocking) > 3:
            text += f"; and {len(blocking) - 3} more"
        if note and end < len(steps):
            text = f"{text} ({note})"
        splits[at] = text
        following[step.device] = at
    return splits


def _blocking(ops: Ops, graph: _Graph, steps: Sequence[Region | Eager], at: int, end: int) -> list[int]:
    """Eager ops between two regions of a device that need the first and that the second needs, if there are such."""
    between = [op for step in steps[at + 1 : end] for op in _members(step)]
    eager = [s.op for s in steps[at + 1 : end] if isinstance(s, Eager) and not ops.ops[s.op].bookkeeping]
    needing = set(_members(steps[at]))
    for op in between:
        if not needing.isdisjoint(graph.before[op]):
            needing.add(op)
    if end == len(steps):
        return [op for op in eager if op in needing] or eager
    needed = {other for op in _members(steps[end]) for other in graph.before[op]}
    for op in reversed(between):
        if op in needed:
            needed.update(graph.before[op])
    both = [op for op in eager if op in needing and op in needed]
    return both or [op for op in eager if op in needed] or eager


def _members(step: Region | Eager) -> Iterator[int]:
    yield from step.ops if isinstance(step, Region) else (step.op,)


def _named(op: Op, verdict: Verdict) -> str:
    where = f" at {op.line}" if op.line else ""
    return f"{op.name}{where}: {verdict.reason.value} ({verdict.detail})"
