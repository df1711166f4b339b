"""What an entry of Thunder's cache was compiled for: its inputs and their layouts; and what new shapes cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from statistics import median

from thunder_cg.compat.thunder import NumberProxy, proxy_shape
from thunder_cg.runtime.program import Program


@dataclass(frozen=True, slots=True)
class InputReport:
    """A tensor that calls of an entry bring: an argument, not a parameter or a buffer of the module.

    Attributes:
        shape: its sizes; None for each that is known only at run time.
        strides: those of each layout that was warmed up, in elements.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    strides: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ShapesReport:
    """Shapes of inputs for each of which Thunder has compiled a function anew.

    Attributes:
        names: of the inputs whose shapes differ.
        shapes: how many there were.
        seconds: what compiling one took, the median of all.
    """

    function: str
    names: tuple[str, ...]
    shapes: int
    seconds: float


def inputs(program: Program) -> tuple[InputReport, ...]:
    """The inputs of a forward, in the order of its arguments."""
    values = [program.ops.values[name] for name in program.ops.args]
    layouts = [*program.layouts()]
    found = []
    for value in values:
        if value.kind == "tensor" and not value.static:
            shape = (None if isinstance(size, NumberProxy) else int(size) for size in proxy_shape(value.proxy))
            strides = dict.fromkeys(known[value.name][1] for known in layouts if known.get(value.name))
            found.append(InputReport(value.users_name, str(value.dtype), tuple(shape), tuple(strides)))
    return tuple(found)


def shapes(functions: Iterable[tuple[str, Program, tuple[InputReport, ...]]]) -> tuple[ShapesReport, ...]:
    """The functions that were compiled several times only because inputs had other shapes."""
    alike: dict[tuple[str, Hashable], list[tuple[Program, tuple[InputReport, ...]]]] = {}
    for function, program, brought in functions:
        made_for = program.compilation
        kinds = tuple((each.name, each.dtype, len(each.shape)) for each in brought)
        mode = made_for.training, made_for.grad, made_for.autocast, kinds
        alike.setdefault((function, mode), []).append((program, brought))
    found = []
    for (function, _), entries in alike.items():
        different = {tuple(each.shape for each in brought) for _, brought in entries}
        if len(different) > 1:
            names = [each.name for i, each in enumerate(entries[0][1]) if len({shapes[i] for shapes in different}) > 1]
            took = median(program.compilation.seconds for program, _ in entries)
            found.append(ShapesReport(function, tuple(names), len(different), took))
    return tuple(found)
