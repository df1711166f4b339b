"""The values that cross from one step of a plan to another: what enters and leaves graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thunder_cg.analysis.ops import Value
from thunder_cg.compat.thunder import proxy_shape
from thunder_cg.runtime.program import Program


@dataclass(frozen=True, slots=True)
class CrossingReport:
    """One value that a step makes, or that comes in, and that another step uses. A step is a region or an eager op."""

    name: str  # in the trace
    kind: str  # "float32[4, 16]"; "number", "future" or "other" for what is no tensor
    nbytes: int  # 0 if unknown
    made_by: int | None  # index of the op that makes it; None for what comes in
    used_by: tuple[int, ...]  # for each other step that uses it, the index of the first op there


def crossings(program: Program) -> Iterator[CrossingReport]:
    """In the order of making, first what comes in. Parameters and buffers, which graphs read where they are, are not
    among them."""
    ops = program.ops
    step_of = {index: at for at, step in enumerate(program.plan.steps) for index in step.ops}
    made_in: dict[str, int | None] = dict.fromkeys(name for name in ops.args if not ops.values[name].static)
    used: dict[str, dict[int, int]] = {}  # by name and step, the op
    for op in ops.ops:
        if not op.bookkeeping:
            for name in op.outputs:
                made_in.setdefault(name, op.index)
        if not op.bookkeeping or op.id == "RETURN":
            for name in op.inputs:
                used.setdefault(name, {}).setdefault(step_of[op.index], op.index)
    for name, maker in made_in.items():
        own = None if maker is None else step_of[maker]
        users = tuple(index for step, index in used.get(name, {}).items() if step != own)
        if maker is None:  # Thunder returns the inputs, too
            users = tuple(index for index in users if ops.ops[index].id != "RETURN")
        if users:
            value = ops.values[name]
            yield CrossingReport(name, _kind(value), value.nbytes, maker, users)


def _kind(value: Value) -> str:
    if value.dtype is None:
        return value.kind
    sizes = ", ".join("?" if not isinstance(size, int) else str(size) for size in proxy_shape(value.proxy))
    return f"{value.dtype}[{sizes}]"
