"""Which operators are the root causes of the eager ops and of the splits of a plan, and what each one costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.analysis.partition import Plan, Region, partition
from thunder_cg.analysis.rules import Reason
from thunder_cg.compat.thunder import NumberProxy
from thunder_cg.errors import CaptureError

_MAX_PLANS = 16  # a plan of 5,000 ops takes 50 ms; of what more causes add, only their ops are counted
_ELSEWHERE = frozenset({Reason.NOT_ON_DEVICE, Reason.MIXED_DEVICES})  # an earlier op has left the device


@dataclass(frozen=True, slots=True)
class RootCause:
    """An operator of the user's, or several alike, without which more of a trace would be captured.

    What it costs is what the plan would save if the operator, and what is eager only because of it, were captured.
    """

    name: str
    place: str  # "at model.py:38"
    source: str | None  # the text of that line
    ops: tuple[int, ...]  # the ops that are eager because of it, and it itself, by their index in the trace
    eager_ops: int  # how many fewer ops would be eager, those that are alone between eager ones included
    added_regions: int  # how many fewer regions there would be
    reason: str
    detail: str
    fix: str


def root_causes(ops: Ops, plan: Plan, aliasing: Aliasing) -> tuple[RootCause, ...]:
    """In the order of the trace. An op that is only alone between eager ones counts for the cause of these."""
    groups: defaultdict[tuple[str, str], list[tuple[Op, Op]]] = defaultdict(list)
    for op in _eager(ops, plan):
        if plan.verdicts[op.index].reason is not Reason.TOO_SMALL:
            root = _root(ops, plan, op)
            groups[root.name, ops.place(root)].append((root, op))
    largest = sorted(groups, key=lambda key: len(groups[key]), reverse=True)[:_MAX_PLANS]
    found = []
    for key, group in groups.items():
        mine = [op for _, op in group]
        found.append(_cause(ops, plan, aliasing, *group[0], mine, plans=key in largest))
    everything = _if_captured(ops, plan, aliasing, {op.index for group in groups.values() for _, op in group})
    small = [op for op in _eager(ops, everything) if everything.verdicts[op.index].reason is Reason.TOO_SMALL]
    return (*found, *([_cause(ops, plan, aliasing, small[0], small[0], small, plans=False)] if small else ()))


def refuse_eager_ops(ops: Ops, plan: Plan, aliasing: Aliasing) -> None:
    """For ``strict="ops"``. Raises `CaptureError` for the first root cause of ops that run eagerly.

    Not for ops whose region is too small to gain: nothing has to change.
    """
    for cause in root_causes(ops, plan, aliasing)[:1]:
        if plan.verdicts[cause.ops[0]].reason is Reason.TOO_SMALL:
            continue
        total = len(_eager(ops, plan))
        more = f", the cause of {cause.eager_ops} of {total} eager ops" if total > 1 else ""
        problem = f"runs eagerly{more}: {cause.reason} ({cause.detail})"
        raise CaptureError(f"{cause.name} {cause.place}", problem, cause.fix, option='strict="ops"')


def _eager(ops: Ops, plan: Plan) -> list[Op]:
    return [op for op, verdict in zip(ops.ops, plan.verdicts) if not (verdict.capture or op.bookkeeping)]


def is_root(ops: Ops, plan: Plan, op: Op) -> bool:
    """Whether an op is not eager because of another one."""
    return next(_causes(ops, plan, op), None) is None


def _root(ops: Ops, plan: Plan, op: Op) -> Op:
    """The first of the ops that are eager because of one another: what reads a number for those that compute with it.

    It may be an op of the forward.
    """
    while (cause := next(_causes(ops, plan, op), None)) is not None:
        op = cause
    return op


def _causes(ops: Ops, plan: Plan, op: Op) -> Iterator[Op]:
    """The eager ops that make op eager, as they made what a graph cannot take. All come before it."""
    if not _is_here(ops, op):  # of the forward, which has computed a number
        arguments = op.symbol.flat_proxy_args if op.symbol is not None else ()
        numbers = (ops.made_by.get(each.name) for each in arguments if isinstance(each, NumberProxy))
        yield from (maker for maker in numbers if maker not in (None, op))
        return
    reason = plan.verdicts[op.index].reason
    devices = {verdict.device for verdict in plan.verdicts if verdict.capture}
    for name in op.inputs:
        maker, value = ops.made_by.get(name), ops.values[name]
        if maker is None or maker is op:
            continue
        if _is_here(ops, maker):
            maker_verdict = plan.verdicts[maker.index]
            # What is too small has its result on the device.
            is_eager = not maker_verdict.capture and maker_verdict.reason is not Reason.TOO_SMALL
        else:
            is_eager = value.symbolic or value.device not in devices
        from_elsewhere = reason in _ELSEWHERE or (reason is Reason.SYMBOLIC_SHAPE and value.symbolic)
        if (from_elsewhere and is_eager) or (reason is Reason.RUNTIME_NUMBER and value.kind == "number"):
            yield maker


def _is_here(ops: Ops, op: Op) -> bool:
    """Whether the op is one of this trace, not of its forward."""
    return op.index < len(ops.ops) and ops.ops[op.index] is op


def _cause(ops: Ops, plan: Plan, aliasing: Aliasing, root: Op, first: Op, mine: list[Op], *, plans: bool) -> RootCause:
    """The cause of the ops ``mine``, of which ``first`` is one. With ``plans``, what it costs besides them."""
    indices = {op.index for op in mine}
    then = _if_captured(ops, plan, aliasing, indices) if plans else plan
    verdict = plan.verdicts[(root if _is_here(ops, root) else first).index]
    return RootCause(
        name=root.name,
        place=ops.place(root),
        source=ops.source(root),
        ops=tuple(sorted(indices)),
        eager_ops=max(len(mine), len(_eager(ops, plan)) - len(_eager(ops, then))),
        added_regions=max(0, _regions(plan) - _regions(then)),
        reason=verdict.reason.value,
        detail=verdict.detail,
        fix=verdict.fix,
    )


def _regions(plan: Plan) -> int:
    return sum(isinstance(step, Region) for step in plan.steps)


def _if_captured(ops: Ops, plan: Plan, aliasing: Aliasing, indices: set[int]) -> Plan:
    """The plan that there would be if these ops could be captured, too."""
    devices = Counter(v.device for v in plan.verdicts if v.capture or v.reason is Reason.TOO_SMALL)
    if not devices:
        return plan
    ((device, _),) = devices.most_common(1)
    verdicts = [
        replace(v, capture=True, device=device if i in indices else v.device)
        if i in indices or v.reason is Reason.TOO_SMALL
        else v
        for i, v in enumerate(plan.verdicts)
    ]
    return partition(ops, verdicts, aliasing)
