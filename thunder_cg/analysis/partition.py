"""Order a trace's ops into the fewest regions that its dependencies allow, in linear time up to sorting."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.classify import Verdict
from thunder_cg.analysis.coalescing import coalesced
from thunder_cg.analysis.dependencies import dependencies, followers
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.rules import Reason
from thunder_cg.analysis.segments import Event, peak

# Regrouping may raise the estimated peak memory by this factor over trace order, no further. An increase of at most as
# many bytes as the slack never matters: torch's allocator asks the device for no smaller segment.
_PEAK_GROWTH = 1.10
_PEAK_SLACK = 2 << 20

NO_GAIN = "nothing has to change: there is nothing to gain"
_FEWEST_KERNELS = 2  # a graph of one kernel launches no faster than the kernel


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that are captured together."""

    ops: tuple[int, ...]  # indices into the trace's ops, in trace order
    device: str
    split: str  # why it ended where it did; empty if no eager op follows


@dataclass(frozen=True, slots=True)
class Eager:
    """An op that runs as it does without this package."""

    op: int

    @property
    def ops(self) -> tuple[int, ...]:
        return (self.op,)


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs, in this order. Every op of the trace is in exactly one step."""

    steps: tuple[Region | Eager, ...]
    verdicts: tuple[Verdict, ...]  # one per op; those of regions that turned out too small say so


@dataclass(frozen=True, slots=True)
class PlannedTrace:
    """All that analysis knows of one trace."""

    kind: str  # "forward" or "backward"
    ops: Ops
    aliasing: Aliasing
    plan: Plan
    returned: Set[str]  # names that the trace returns to the caller
    # Names that it keeps for its backward. They stay in the pool, where nothing overwrites them until then.
    saved: Set[str]


def partition(ops: Ops, verdicts: Sequence[Verdict], aliasing: Aliasing) -> Plan:
    """Orders ``ops`` so that those to capture form the fewest regions.

    On each device, no order that respects `dependencies` has fewer regions. With several devices this is nearly so; an
    exact answer would need a search. Among the orders with as few regions, ops stay as close to trace order as they
    can. Trace order itself is kept where regrouping would raise the estimated peak memory by more than a tenth. A
    collective and its wait stay in one region, or stay eager. Those that are launched together are not chosen by the
    memory, since another rank may have a smaller batch.
    """
    plan = _whole(ops, verdicts, aliasing, by_memory=True)
    if not aliasing.collectives:
        return plan
    regrouped = _whole(ops, verdicts, aliasing, by_memory=False)
    return plan if _launches(ops, plan) == _launches(ops, regrouped) else regrouped


def _whole(ops: Ops, verdicts: Sequence[Verdict], aliasing: Aliasing, *, by_memory: bool) -> Plan:
    """A plan in which no collective is apart from its wait."""
    plan = _partition(ops, verdicts, aliasing, by_memory=by_memory)
    while parted := _parted(ops, plan):
        verdicts = [parted.get(i, verdict) for i, verdict in enumerate(verdicts)]
        plan = _partition(ops, verdicts, aliasing, by_memory=by_memory)
    return plan


def _launches(ops: Ops, plan: Plan) -> list[list[int]]:
    """The collectives that one launch makes, where those are several."""
    regions = [[ops.ops[i] for i in step.ops] for step in plan.steps if isinstance(step, Region)]
    launches = ([region[i].index for i in each] for region in regions for each in coalesced(region, ops.values))
    return [launch for launch in launches if len(launch) > 1]


def _parted(ops: Ops, plan: Plan) -> dict[int, Verdict]:
    """Ops to capture that begin a collective, or wait for it, where the other one is in another step, or nowhere.

    With the verdicts that leave them eager.
    """
    step_of = {op: at for at, step in enumerate(plan.steps) for op in step.ops}
    of_future: defaultdict[str, list[int]] = defaultdict(list)
    for op in ops.ops:
        for name in op.names:
            if ops.values[name].kind == "future":
                of_future[name].append(op.index)
    parted: dict[int, Verdict] = {}
    for mine in of_future.values():
        if len(mine) < 2 or len({step_of[i] for i in mine}) > 1:
            both = [plan.verdicts[op] for op in mine]
            parted |= {op: _apart(plan.verdicts[op], both) for op in mine if plan.verdicts[op].capture}
    return parted


def _apart(verdict: Verdict, both: Sequence[Verdict]) -> Verdict:
    """The verdict that leaves it eager, given those of a collective and its wait, or of one that is alone."""
    if (eager := next((each for each in both if not each.capture), None)) is not None:
        detail = f"a collective and its wait are captured together, and the other one is eager: {eager.detail}"
        return replace(verdict, capture=False, reason=eager.reason, detail=detail, fix=eager.fix)
    detail = "the collective and its wait are not in one region, and a graph cannot wait for work from outside"
    fix = "allow or remove the eager operators between them"
    if len(both) < 2:
        detail = "nothing in the trace waits for the collective, and its memory would be used again while it runs"
        fix = "wait for it in what is compiled"
    return replace(verdict, capture=False, reason=Reason.COLLECTIVE, detail=detail, fix=fix)


def _partition(ops: Ops, verdicts: Sequence[Verdict], aliasing: Aliasing, *, by_memory: bool) -> Plan:
    graph = DependencyGraph.of(ops, verdicts, aliasing)
    memory = PeakMemory.of(ops, set(graph.colors), aliasing)
    in_order = _runs(range(len(ops.ops)), graph.colors)
    runs = _runs(graph.schedule(), graph.colors)
    before, after = (memory.peak(op for _, members in order for op in members) for order in (in_order, runs))
    if not by_memory or after <= max(before * _PEAK_GROWTH, before + _PEAK_SLACK):
        return _plan(ops, verdicts, graph, runs, "")
    note = f"kept in trace order: regrouping would raise the estimated peak memory from {before:,} to {after:,} bytes"
    return _plan(ops, verdicts, graph, in_order, note if len(in_order) > len(runs) else "")


# Note [Time]
# A schedule is a sequence of groups, each on one device, with a slot for eager ops before, between and after them.
# Group g (from 1) has time 2g, the slot after it 2g + 1, the first slot 1. An op's time is at least that of each op
# before it. Ops of equal time run in trace order. So the times of all ops define the schedule.


@dataclass(frozen=True, slots=True)
class DependencyGraph:
    """Ops as the scheduler sees them."""

    before: list[list[int]]
    after: list[list[int]]
    colors: list[str | None]  # the device of an op to capture; None for eager ones

    @classmethod
    def of(cls, ops: Ops, verdicts: Sequence[Verdict], aliasing: Aliasing) -> DependencyGraph:
        before = dependencies(ops, aliasing)
        return cls(before, followers(before), [v.device if v.capture else None for v in verdicts])

    def schedule(self) -> list[int]:
        """A time for each op: as close to trace order as the fewest groups allow."""
        groups = _groups(self)
        at: defaultdict[str, list[int]] = defaultdict(list)
        for position, device in enumerate(groups, start=1):
            at[device].append(2 * position)
        earliest: list[int] = []
        for op, color in enumerate(self.colors):
            earliest.append(_not_before(max((earliest[other] for other in self.before[op]), default=1), color, at))
        latest = self._latest(at, end=2 * len(groups) + 1)
        now = 0
        times = []
        for op, color in enumerate(self.colors):
            # An op does not run before ops that come earlier in the trace, unless a region would wait for it. An op
            # that depends on another has no smaller latest time, so it never comes before the other.
            times.append(_not_before(max(earliest[op], min(now, latest[op])), color, at))
            now = max(now, times[-1])
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


def _groups(graph: DependencyGraph) -> list[str]:
    """The devices of the groups, in order.

    Runs all eager ops that are ready, then all ops of one device that are ready, and so on. With one device no order
    has fewer groups: all ops that another order has run by the end of its k-th group, this order has run, too. With
    several devices, a device waits until all ops that can be in its group are ready, unless all devices wait.
    """
    waiting = [len(earlier) for earlier in graph.before]
    ready: dict[str | None, list[int]] = defaultdict(list)
    for op, count in enumerate(waiting):
        if not count:
            ready[graph.colors[op]].append(op)
    fronts = [_Progress(graph, device) for device in dict.fromkeys(c for c in graph.colors if c is not None)]

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


class _Progress:
    """How far the schedule of one device is. The level of an op is the number of groups of the device up to the op."""

    def __init__(self, graph: DependencyGraph, device: str) -> None:
        levels: list[int] = []
        for op, color in enumerate(graph.colors):
            own = color == device
            needed = (levels[other] + (own and graph.colors[other] != device) for other in graph.before[op])
            levels.append(max((int(own), *needed)))
        self.graph, self.device, self.levels = graph, device, levels
        mine = [op for op, color in enumerate(graph.colors) if color == device]
        self.left = Counter(levels[op] for op in mine)
        self.foreign = Counter(levels[op] for op in mine for other in graph.before[op] if graph.colors[other] != device)
        self.level, self.deepest = 1, max(self.left)

    def ran(self, op: int) -> None:
        if self.graph.colors[op] == self.device:
            self.left[self.levels[op]] -= 1
            return
        for later in self.graph.after[op]:
            if self.graph.colors[later] == self.device:
                self.foreign[self.levels[later]] -= 1

    def is_whole(self) -> bool:
        """Whether the ops of the current level wait only for ops of this device."""
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


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """An estimate of the memory that a schedule needs on the captured devices."""

    allocates: list[dict[str, int]]  # for each op, bytes by alias set
    start: dict[str, int]  # likewise, of tensors from outside that the call can free: not of parameters and buffers
    touches: Sequence[frozenset[str]]  # for each op, the alias sets that it reads or writes
    returned: set[str]  # alias sets that stay alive to the end, because they are returned or saved

    @classmethod
    def of(cls, ops: Ops, devices: Set[str | None], aliasing: Aliasing) -> PeakMemory:
        """That of a trace of which regions are on ``devices``."""
        sets, outside = aliasing.sets, aliasing.sets_of(ops.args)

        def largest(names: Iterable[str], not_in: Set[str] = frozenset()) -> dict[str, int]:
            """For each alias set of the names, the bytes of the largest."""
            sizes: dict[str, int] = {}
            for name in names:
                if name in sets and sets[name] not in not_in:
                    nbytes = ops.values[name].nbytes if ops.values[name].device in devices else 0
                    sizes[sets[name]] = max(sizes.get(sets[name], 0), nbytes)
            return sizes

        allocates = [largest(op.outputs, not_in=aliasing.sets_of(op.inputs) | outside) for op in ops.ops]
        start = largest(name for name in ops.args if not ops.values[name].static)
        returned = (name for op in ops.ops if op.id == "RETURN" for name in op.inputs)
        return cls(allocates, start, aliasing.reads, aliasing.sets_of(returned))

    def peak(
        self, order: Iterable[int], start: Mapping[str, int] | None = None, returned: Set[str] | None = None
    ) -> int:
        """Bytes alive at once, at most, if ops run in this order and memory is freed after its last use.

        Args:
            start: takes the place of the attribute, and so does ``returned``.
        """
        return peak(self.events(order, returned), self.start if start is None else start)

    def events(self, order: Iterable[int], returned: Set[str] | None = None) -> Iterator[Event]:
        """What is allocated and freed, in this order, by alias set."""
        order, returned = [*order], self.returned if returned is None else returned
        last = {name: position for position, op in enumerate(order) for name in self.touches[op]}
        for position, op in enumerate(order):
            yield from ((name, nbytes) for name, nbytes in self.allocates[op].items() if nbytes)
            yield from ((name, 0) for name in self.touches[op] if last[name] == position and name not in returned)


def _plan(
    ops: Ops, verdicts: Sequence[Verdict], graph: DependencyGraph, runs: list[tuple[str | None, list[int]]], note: str
) -> Plan:
    final = list(verdicts)
    has_eager = any(color is None and not op.bookkeeping for op, color in zip(ops.ops, graph.colors))
    steps: list[Region | Eager] = []
    for color, members in runs:
        if color is None:
            steps.extend(Eager(op) for op in members)
        elif (kernels := sum(_kernels(ops.ops[op], verdicts[op]) for op in members)) < _FEWEST_KERNELS:
            steps.extend(Eager(op) for op in members)
            for op in members:
                final[op] = _too_small(final[op], kernels, has_eager)
        else:
            steps.append(Region(tuple(members), color, ""))
    _say_why_regions_end(ops, final, graph, steps, note)
    return Plan(tuple(steps), tuple(final))


def _kernels(op: Op, verdict: Verdict) -> int:
    """A lower bound of the number of kernels that the op launches; views and allocations launch none.

    A fusion counts as the ops inside of it. It may be one kernel, but a call of it costs more than several launches.
    """
    if verdict.reason is Reason.USER_ALLOW:
        return _FEWEST_KERNELS
    if op.is_fusion:
        return max(1, sum(_kernels(sub, verdict) for sub in op.subs))
    return int(op.rule is None or op.rule.launches_kernels)


def _too_small(verdict: Verdict, kernels: int, has_eager: bool) -> Verdict:
    found = "only views" if kernels == 0 else "one kernel"
    where = "alone between eager operators or devices" if has_eager else "all that the trace runs on its device"
    detail = f"{where}: {found}, and a graph of fewer than two launches is no faster"
    fix = "allow or remove the eager operators around it, and it joins the region before or after them"
    if not has_eager:
        fix = NO_GAIN
    return replace(verdict, capture=False, reason=Reason.TOO_SMALL, detail=detail, fix=fix)


def _say_why_regions_end(
    ops: Ops, verdicts: Sequence[Verdict], graph: DependencyGraph, steps: list[Region | Eager], note: str
) -> None:
    def named(op: Op, verdict: Verdict) -> str:
        where = f" {ops.place(op)}" if ops.line(op) else ""
        return f"{op.name}{where}: {verdict.reason.value} ({verdict.detail})"

    def follow(blocking: list[int]) -> set[int]:
        """Those of the ops that are eager only because they take a number that another one makes."""
        makers = {id(ops.ops[op]) for op in blocking}
        takers = (op for op in blocking if verdicts[op].reason is Reason.RUNTIME_NUMBER)
        return {op for op in takers if any(id(ops.made_by.get(name)) in makers for name in ops.ops[op].inputs)}

    following: dict[str, int] = {}  # by device, the next region
    for at in reversed(range(len(steps))):
        step = steps[at]
        if not isinstance(step, Region):
            continue
        end = following.get(step.device, len(steps))
        blocking = _blocking(ops, graph, steps, at, end)
        followers = follow(blocking)
        blocking = [op for op in blocking if op not in followers] or blocking
        text = "; ".join(named(ops.ops[op], verdicts[op]) for op in blocking[:3])
        if len(blocking) > 3:
            text += f"; and {len(blocking) - 3} more"
        if note and end < len(steps):
            text = f"{text} ({note})"
        steps[at] = replace(step, split=text)
        following[step.device] = at


def _blocking(ops: Ops, graph: DependencyGraph, steps: Sequence[Region | Eager], at: int, end: int) -> list[int]:
    """Eager ops between two regions of a device that depend on the first and on which the second depends.

    If there are none, those on which the second depends; if there are none of these, all eager ops in between.
    """
    between = [op for step in steps[at + 1 : end] for op in step.ops]
    eager = [s.op for s in steps[at + 1 : end] if isinstance(s, Eager) and not ops.ops[s.op].bookkeeping]
    needing = set(steps[at].ops)
    for op in between:
        if not needing.isdisjoint(graph.before[op]):
            needing.add(op)
    if end == len(steps):
        return [op for op in eager if op in needing] or eager
    needed = {other for op in steps[end].ops for other in graph.before[op]}
    for op in reversed(between):
        if op in needed:
            needed.update(graph.before[op])
    both = [op for op in eager if op in needing and op in needed]
    return both or [op for op in eager if op in needed] or eager
