"""What crosses the edge of each region: its inputs, its results, and which of them leave the call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from thunder_cg.analysis import rules
from thunder_cg.analysis.aliasing import alias_sets, is_opaque, reads, writes
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.partition import Plan, Region
from thunder_cg.analysis.rules import Reason

# An eager operator with one of these reasons may keep what it gets, return views of it, or write it.
_OPAQUE = frozenset({Reason.UNKNOWN, Reason.USER_DENY, Reason.SIDE_EFFECT})


@dataclass(frozen=True, slots=True)
class RegionOutput:
    """A value that a region makes and something outside the region uses.

    A value may be handed out twice: ``inside``, at its address in the arena, for what runs while the call holds the
    arena, and as a copy that ``leaves`` and belongs to the caller.

    Attributes:
        last: the op after which the region touches its memory no more, so that it may leave before the region's end;
            None if something else shares the memory.
    """

    name: str
    inside: bool
    leaves: bool
    last: int | None = None


@dataclass(frozen=True, slots=True)
class RegionIO:
    """The edge of one region.

    Attributes:
        inputs: tensors that the region reads or writes and does not make, in order of first use.
        written: those of them whose memory the region may write.
        shared: those of them that an exit may be a view of.
        numbers: what its kernels are given before each launch; see `rules.KERNEL_SCALARS`.
        outputs_: what the region makes for others, in order of making.
        alive: of all values, those whose memory is still needed when the region has run.
    """

    inputs: tuple[str, ...]
    written: frozenset[str]
    shared: frozenset[str]
    numbers: tuple[str, ...]
    outputs_: tuple[RegionOutput, ...]
    alive: frozenset[str]


def region_ios(ops: Ops, plan: Plan, returned: Set[str], saved: Set[str]) -> tuple[RegionIO, ...]:
    """One io per region of ``plan``, in order.

    Args:
        ops: the trace.
        plan: its partition.
        returned: names that the trace returns to the caller.
        saved: names that it keeps for its backward; they stay inside, for the call holds its arena until then.
    """
    root = alias_sets(ops)
    wrote = [writes(op, root) for op in ops.ops]
    step_of = {
        i: s for s, step in enumerate(plan.steps) for i in (step.ops if isinstance(step, Region) else (step.op,))
    }
    made_in: dict[str, int] = {}
    used_in: dict[str, set[int]] = {}
    written_in: dict[str, set[int]] = {}
    for op in ops.ops:
        at = step_of[op.index]
        for name in op.outputs:
            made_in.setdefault(name, at)
        if op.id != "RETURN":  # what it uses is ``returned`` and ``saved``; Thunder may drop the rest again
            for name in op.inputs:
                used_in.setdefault(name, set()).add(at)
        for written in wrote[op.index]:
            written_in.setdefault(written, set()).add(at)
    lent = _aliased_by_eager_ops(ops, plan, root, used_in, saved)
    kept = lent | _must_be_copied_out(ops, plan, root, made_in, written_in, returned)
    last = _last_uses(root, used_in, saved, len(plan.steps)) | dict.fromkeys(lent, len(plan.steps))

    result = []
    candidates = [n for n in ops.args if n in root]  # inputs, and what earlier regions made
    for at, step in enumerate(plan.steps):
        if not isinstance(step, Region):
            continue
        mine = [ops.ops[i] for i in step.ops]
        made = {name for op in mine for name in op.outputs}
        inputs = dict.fromkeys(n for op in mine for n in op.inputs if n not in made or made_in[n] != at)
        tensors = tuple(n for n in inputs if ops.values[n].kind == "tensor")
        touched = {r for op in mine for r in wrote[op.index]}
        outputs_ = []
        for name in dict.fromkeys(n for op in mine for n in op.outputs):
            if made_in[name] != at or ops.values[name].kind != "tensor":
                continue
            used = name in saved or bool(used_in.get(name, set()) - {at})
            if root[name] in kept and (used or name in returned):
                outputs_.append(RegionOutput(name, inside=False, leaves=True))
            elif used or name in returned:
                outputs_.append(RegionOutput(name, inside=used, leaves=name in returned))
        exit_roots = {root[exit.name] for exit in outputs_}
        outputs_ = _with_last(outputs_, mine, root, {root[n] for n in tensors})
        result.append(
            RegionIO(
                inputs=tensors,
                written=frozenset(n for n in tensors if root[n] in touched),
                shared=frozenset(n for n in tensors if root[n] in exit_roots),
                numbers=tuple(n for n in inputs if ops.values[n].kind == "number"),
                outputs_=tuple(outputs_),
                alive=frozenset(n for n in candidates if last[root[n]] > at),
            )
        )
        candidates = [n for n in candidates if last[root[n]] > at] + [exit.name for exit in outputs_]
    return tuple(result)


def _with_last(
    outputs_: list[RegionOutput], ops: Sequence[Op], root: Mapping[str, str], entered: Set[str]
) -> list[RegionOutput]:
    """The outputs_ of a region of these ops, with their `last`; ``entered`` are the roots of its inputs."""
    touched = {name: op.index for op in ops for name in reads(op, root)}
    count = Counter(root[exit.name] for exit in outputs_)
    may_go = {r for r, n in count.items() if n == 1 and r not in entered and touched[r] != ops[-1].index}
    return [
        replace(exit, last=touched[root[exit.name]])
        if exit.leaves and not exit.inside and root[exit.name] in may_go
        else exit
        for exit in outputs_
    ]


def _last_uses(root: Mapping[str, str], used_in: Mapping[str, set[int]], saved: Set[str], end: int) -> dict[str, int]:
    """The last step that uses each root's memory; ``end`` for what the backward will use."""
    last = dict.fromkeys(root.values(), -1)
    for name, steps in used_in.items():
        if name in root:
            last[root[name]] = max(last[root[name]], *steps)
    for name in saved:
        if name in root:
            last[root[name]] = end
    return last


def _must_be_copied_out(
    ops: Ops,
    plan: Plan,
    root: Mapping[str, str],
    made_in: Mapping[str, int],
    written_in: Mapping[str, set[int]],
    returned: Set[str],
) -> set[str]:
    """Memory that cannot be handed out twice, because a copy and its original would come apart.

    That is memory of which something leaves and which is written outside the region that made it, or shared between
    values of several steps, or seen by an opaque operator. All of it leaves, and whoever needs it uses what left.
    """
    opaque = {
        root[name]
        for op in ops.ops
        if not op.bookkeeping and not plan.verdicts[op.index].capture and _may_keep(op, plan.verdicts[op.index].reason)
        for name in op.inputs
        if name in root
    }
    makers: dict[str, set[int]] = {}
    for name, at in made_in.items():
        if name in root:
            makers.setdefault(root[name], set()).add(at)
    leaving = {root[name] for name in returned if name in root}
    together = {r for r in leaving if len(makers.get(r, set()) | written_in.get(r, set())) > 1}
    return opaque | together


def _aliased_by_eager_ops(
    ops: Ops, plan: Plan, root: Mapping[str, str], used_in: Mapping[str, set[int]], saved: Set[str]
) -> set[str]:
    """Memory that a region or the backward gets by a name which an eager operator gave it, such as that of a view.

    In an arena, only the values that regions make own their memory, and a region that needs one for the last time gives
    it up before it runs. Who knows the memory by another name would find it reused. So all of that leaves, and what the
    forward left in the arena stays to the end.
    """
    is_region = [isinstance(step, Region) for step in plan.steps]
    eager = [ops.ops[step.op] for step in plan.steps if not isinstance(step, Region)]
    return {
        root[name]
        for op in eager
        if not op.bookkeeping
        for name in op.outputs
        if name in root and (name in saved or any(is_region[at] for at in used_in.get(name, ())))
    }


def _may_keep(op: Op, reason: Reason) -> bool:
    """May the eager op keep its inputs? Its verdict names only the first reason found, so the op counts too."""
    denied = rules.DENY.get(rules.find(op.executor, op.id))
    return reason in _OPAQUE or is_opaque(op) or (denied is not None and denied.reason in _OPAQUE)
