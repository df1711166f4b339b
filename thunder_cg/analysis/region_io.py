"""What each region gets and gives: its inputs, the numbers for its kernels, its outputs, and what stays alive."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.partition import Plan, PlannedTrace, Region
from thunder_cg.analysis.rules import Reason

# An eager operator with one of these reasons may keep its inputs, return views of them, or write them.
_MAY_KEEP_INPUTS = frozenset({Reason.UNKNOWN, Reason.USER_DENY, Reason.SIDE_EFFECT})


@dataclass(frozen=True, slots=True)
class RegionInput:
    """A tensor that a region reads or writes and does not make."""

    name: str
    written: bool  # the region may write its memory
    aliased: bool  # an output of the region may be a view of it


@dataclass(frozen=True, slots=True)
class RegionOutput:
    """A tensor that a region makes for other steps of the plan, for the backward or for the caller."""

    name: str
    copied_out: bool  # it leaves the pool: the caller gets a copy; otherwise it stays in the pool, at a fixed address
    # The position, among the region's ops, of the op after which it may be copied out early. None: only at the end.
    last_use: int | None = None


@dataclass(frozen=True, slots=True)
class RegionIO:
    """What one region gets and gives."""

    inputs: tuple[RegionInput, ...]  # tensors, in order of first use
    scalars: tuple[str, ...]  # numbers that its kernels are given before each launch; see `ExecutorRule.kernel_scalars`
    # In order of making. A value that both stays in the pool and leaves has two outputs, the one that stays first.
    outputs: tuple[RegionOutput, ...]
    alive: frozenset[str]  # of all values, those whose memory is still needed when the region has run


def region_io(trace: PlannedTrace) -> tuple[RegionIO, ...]:
    """One record for each region of the trace's plan, in order."""
    ops, plan, aliasing, returned, saved = trace.ops, trace.plan, trace.aliasing, trace.returned, trace.saved
    steps = _Steps.of(ops, plan, aliasing)
    aliased = _aliased_by_eager_ops(ops, plan, aliasing, steps, saved)
    copied_out = aliased | _must_be_copied_out(ops, plan, aliasing, steps, returned)
    last = _last_steps(aliasing, steps, saved, len(plan.steps)) | dict.fromkeys(aliased, len(plan.steps))
    result = []
    candidates = [name for name in ops.args if name in aliasing.sets]  # inputs, and outputs of earlier regions
    for at, step in enumerate(plan.steps):
        if not isinstance(step, Region):
            continue
        mine = [ops.ops[i] for i in step.ops]
        results = dict.fromkeys(n for op in mine for n in op.outputs if steps.made[n] == at)
        inputs = dict.fromkeys(n for op in mine for n in op.inputs if n not in results)
        tensors = [name for name in inputs if ops.values[name].kind == "tensor"]
        kinds: dict[str, tuple[bool, bool]] = {}  # of each output, whether it stays in the pool, and whether it leaves
        for name in results:
            used = name in saved or bool(steps.used.get(name, set()) - {at})
            if ops.values[name].kind == "tensor" and (used or name in returned):
                leaves = aliasing.sets[name] in copied_out
                kinds[name] = (used and not leaves, name in returned or leaves)
        written = {name for op in mine for name in aliasing.writes[op.index]}
        given, entered = aliasing.sets_of(kinds), aliasing.sets_of(tensors)
        alive = [name for name in candidates if last[aliasing.sets[name]] > at]
        result.append(
            RegionIO(
                tuple(RegionInput(n, aliasing.sets[n] in written, aliasing.sets[n] in given) for n in tensors),
                tuple(name for name in inputs if ops.values[name].kind == "number"),
                (*_outputs(kinds, mine, aliasing, entered),),
                frozenset(alive),
            )
        )
        candidates = [*alive, *kinds]
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a plan in which values are made and used, by name, and memory is written, by alias set."""

    made: Mapping[str, int]
    used: Mapping[str, Set[int]]
    written: Mapping[str, Set[int]]

    @classmethod
    def of(cls, ops: Ops, plan: Plan, aliasing: Aliasing) -> _Steps:
        step_of = {op: at for at, step in enumerate(plan.steps) for op in step.ops}
        made: dict[str, int] = {}
        used: defaultdict[str, set[int]] = defaultdict(set)
        written: defaultdict[str, set[int]] = defaultdict(set)
        for op in ops.ops:
            at = step_of[op.index]
            for name in op.outputs:
                made.setdefault(name, at)
            if op.id != "RETURN":  # its inputs are in ``returned`` and ``saved``; Thunder may drop others again
                for name in op.inputs:
                    used[name].add(at)
            for name in aliasing.writes[op.index]:
                written[name].add(at)
        return cls(made, used, written)


def _outputs(
    kinds: Mapping[str, tuple[bool, bool]], ops: Sequence[Op], aliasing: Aliasing, entered: Set[str]
) -> Iterator[RegionOutput]:
    """The outputs of a region of these ops.

    An output may be copied out early if it only leaves and nothing else shares its memory: no input, of which
    ``entered`` are the alias sets, and no other output. After the last op nothing is early.
    """
    touched = {name: position for position, op in enumerate(ops) for name in aliasing.reads[op.index]}
    count = Counter(aliasing.sets[name] for name in kinds)
    for name, (stays, leaves) in kinds.items():
        memory = aliasing.sets[name]
        early = not stays and count[memory] == 1 and memory not in entered and touched[memory] != len(ops) - 1
        if stays:
            yield RegionOutput(name, copied_out=False)
        if leaves:
            yield RegionOutput(name, copied_out=True, last_use=touched[memory] if early else None)


def _last_steps(aliasing: Aliasing, steps: _Steps, saved: Set[str], end: int) -> dict[str, int]:
    """For each alias set, the last step that uses its memory; ``end`` if the backward uses it."""
    last = dict.fromkeys(aliasing.sets.values(), -1)
    for name, used in steps.used.items():
        if name in aliasing.sets:
            last[aliasing.sets[name]] = max(last[aliasing.sets[name]], *used)
    return last | dict.fromkeys(aliasing.sets_of(saved), end)


def _must_be_copied_out(ops: Ops, plan: Plan, aliasing: Aliasing, steps: _Steps, returned: Set[str]) -> set[str]:
    """Alias sets that cannot both stay in the pool and leave, because a copy and its original would come to differ.

    These are sets with a returned value that are written outside of the region that made them, or shared between
    values of several steps, and sets that an opaque operator sees. All of these values leave, and their users get the
    copies.
    """
    eager = ((op, verdict) for op, verdict in zip(ops.ops, plan.verdicts) if not (op.bookkeeping or verdict.capture))
    kept = {name for op, verdict in eager if _may_keep_inputs(op, verdict.reason, aliasing) for name in op.inputs}
    touched: defaultdict[str, set[int]] = defaultdict(set)
    for name, at in steps.made.items():
        if name in aliasing.sets:
            touched[aliasing.sets[name]].add(at)
    for memory, written in steps.written.items():
        touched[memory] |= written
    shared = {memory for memory in aliasing.sets_of(returned) if len(touched[memory]) > 1}
    return aliasing.sets_of(kept) | shared


def _aliased_by_eager_ops(ops: Ops, plan: Plan, aliasing: Aliasing, steps: _Steps, saved: Set[str]) -> set[str]:
    """Alias sets of outputs of eager ops, such as views, that a region or the backward gets.

    In an arena, only the values that regions make own their memory, and a region that uses such a value for the last
    time frees the memory before it runs. A view made by an eager op would then show memory that is used again. So all
    of these values leave, and memory that the forward left in the arena stays to the end.
    """
    regions = {at for at, step in enumerate(plan.steps) if isinstance(step, Region)}
    eager = (ops.ops[step.op] for step in plan.steps if not isinstance(step, Region))
    outputs = (name for op in eager if not op.bookkeeping for name in op.outputs)
    return aliasing.sets_of(
        name for name in outputs if name in saved or not regions.isdisjoint(steps.used.get(name, ()))
    )


def _may_keep_inputs(op: Op, reason: Reason, aliasing: Aliasing) -> bool:
    """Whether the eager op may keep its inputs. Its verdict has only the first reason found, so the op counts, too."""
    reasons = {reason} if op.rule is None else {reason, op.rule.cause.reason}
    return op.index in aliasing.opaque or not reasons.isdisjoint(_MAY_KEEP_INPUTS)
