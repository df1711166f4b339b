"""What an entry of Thunder's cache was compiled for: its inputs and their layouts; and what calls brought besides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from thunder_cg.compat.dynamo_records import BEFORE_BREAK, DynamoGuard, Recompilation, is_after_break
from thunder_cg.compat.thunder import NumberProxy, proxy_shape
from thunder_cg.report.programs import Located
from thunder_cg.runtime.changes import AFTER_BREAK, SIZES, CallChange
from thunder_cg.runtime.program import Program


@dataclass(frozen=True, slots=True)
class InputReport:
    """A tensor that calls of an entry bring: an argument, not a parameter or a buffer of the module.

    Attributes:
        shape: its sizes; None for each that is known only at run time.
        strides: those of each layout that was warmed up, in elements; if none was, of the first call.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    strides: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """What calls of a function brought that nothing was made for yet, so that they replayed nothing.

    Attributes:
        kind: "shape", "number", "attribute", "constant" or "items", for which Thunder compiles anew; "size", "strides",
            "alignment", "layout" or "settings", for which a call warms up and a later one captures; "moved", "dropped"
            or "budget", for which a call captures again.
        names: of the inputs; of dropped graphs, the option that bounds them.
        values: how many different ones there were.
        times: calls that brought another value.
        seconds: that Thunder took to compile the last version because of it.
        problem, cost, fix: all that in words, and what to do about it.
    """

    function: str
    kind: str
    names: tuple[str, ...]
    values: int
    times: int
    seconds: float
    problem: str
    cost: str
    fix: str


def inputs(program: Program) -> Iterator[InputReport]:
    """The inputs of a forward, in the order of its arguments."""
    values = [program.ops.values[name] for name in program.ops.args]
    layouts = [*program.layouts()]
    for value in values:
        if value.kind == "tensor" and not value.static:
            shape = (None if isinstance(size, NumberProxy) else int(size) for size in proxy_shape(value.proxy))
            strides = dict.fromkeys(known[value.name][1] for known in layouts if known.get(value.name))
            yield InputReport(value.users_name, str(value.dtype), tuple(shape), tuple(strides))


def _are_sizes(function: str, change: CallChange, sized: Set[tuple[str, int]]) -> bool:
    """Whether these are numbers of Dynamo's for sizes of tensors, which change as well."""
    numbers = {(function, number) for of in change.values for number in of} if change.kind == "number" else set()
    return {*change.names} == {BEFORE_BREAK} and bool(numbers) and numbers <= sized


def changes(programs: Iterable[Located], recompilations: Iterable[Recompilation]) -> tuple[ChangeReport, ...]:
    """Because of what calls replayed nothing. The versions of a function share what is known of it.

    A size that only what comes after a graph break was compiled anew for follows from the break.
    """
    functions = {id(each.program.compilation.changes): each for each in programs}
    pairs = [(each.function, change) for each in functions.values() for change in each.program.compilation.changes]
    shapes = [(function, shape) for function, each in pairs if each.kind in SIZES for of in each.values for shape in of]
    sized = {(function, size) for function, shape in shapes for size in shape}
    pairs = [each for each in pairs if not _are_sizes(*each, sized)]
    guards = ((DynamoGuard.of(each.condition), is_after_break(each.function)) for each in recompilations)
    sizes = {(name, after) for guard, after in guards for name in guard.sized}
    follow = {BEFORE_BREAK} | {name for name, after in sizes if after and (name, False) not in sizes}
    return tuple(
        ChangeReport(
            function,
            change.kind,
            change.names,
            len(change.values),
            change.times,
            change.seconds,
            change.problem,
            change.cost,
            f"{AFTER_BREAK}, as said above"
            if change.kind in ("number", *SIZES) and not follow.isdisjoint(change.names)
            else change.fix,
        )
        for function, change in pairs
    )
