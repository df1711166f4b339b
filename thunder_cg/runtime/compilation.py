"""What Thunder compiled a trace for, and how long that took, for the log and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thunder_cg.analysis.compile_errors import compiler_name, to_try
from thunder_cg.analysis.sources import SourceLine, described, line_of
from thunder_cg.compat.compilation import compile_phase
from thunder_cg.compat.compiled import NAME
from thunder_cg.compat.settings import functorch_is_active
from thunder_cg.compat.torch_compile import stacks_of_generated_code
from thunder_cg.compat.tracing import faster_tracing
from thunder_cg.progress import Stage
from thunder_cg.runtime.changes import CallChange, Changes, differing
from thunder_cg.runtime.failures import note

NAMES = "thunder_cg.names"  # beside `NAME`: what the user calls the inputs of a graph, by the names of their nodes
OF_MODULES = "thunder_cg.of_modules"  # beside `NAME`: the names of inputs of a graph that modules have


def name_of(fn: Any) -> str:
    """The user's name for what is compiled: a module's class, a function's qualified name, "Net, graph 0"."""
    fn = getattr(fn, "_orig_mod", fn)
    name = fn.meta.get(NAME) if isinstance(fn, torch.fx.GraphModule) else None
    return str(name or getattr(fn, "__qualname__", type(fn).__name__))


def changed_part(model: str, part: str) -> str:
    """What to say of a part that a model has, or has no more, since Thunder compiled it."""
    when = f"after thunder.jit compiled the {model}, and calls run as before"
    fix = "compile the model anew, or copy into its tensors in place"
    return f"{model}.{part} was added, removed or replaced {when}; {fix}"


# How often Thunder raised, and what it raised last, by its statistics of what it compiled.
_compile_failures: WeakKeyDictionary[Any, tuple[int, str | None]] = WeakKeyDictionary()


def compile_failures(statistics: Any) -> tuple[int, str | None]:
    """How often Thunder raised while it compiled what has these statistics, and what last, where, and what to try."""
    return _compile_failures.get(statistics, (0, None))


def set_compile_failures(statistics: Any, before: tuple[int, str | None]) -> None:
    """Has it be as it was when `compile_failures` returned this."""
    _compile_failures[statistics] = before


@contextmanager
def compiling(data: Any, statistics: Any) -> Iterator[None]:
    """Inside, Thunder compiles what these belong to: it traces faster, and a terminal shows what it is busy with."""
    began = statistics.last_trace_cache_stop / 1e9
    with Stage(lambda: f"compiling {name_of(data.fn)}: {compile_phase(statistics)}", began), faster_tracing():
        yield


def note_compile_failure(data: Any, statistics: Any, error: Exception) -> None:
    """Keeps what Thunder raised while it compiled something, and where, and notes on the error what to try."""
    stacks = stacks_of_generated_code(data.fn)
    problem, line = described(error, stacks), line_of(error, stacks)
    is_of_dynamo = isinstance(data.fn, torch.fx.GraphModule)
    said = with_advice(error, name_of(data.fn), problem, line, is_of_dynamo=is_of_dynamo)
    _compile_failures[statistics] = compile_failures(statistics)[0] + 1, said


def with_advice(error: Exception, name: str, problem: str, line: SourceLine | None, *, is_of_dynamo: bool) -> str:
    """What was raised while something of that name was compiled, and on a line of its own what to try.

    The error gets a note of both.
    """
    fix = to_try(problem, line, is_of_dynamo=is_of_dynamo, in_functorch=functorch_is_active())
    if fix:
        who = compiler_name(is_of_dynamo=is_of_dynamo)
        note(error, f"{who} raised this while it compiled {name}: {problem}. To try: {fix}.")
    return f"{problem}.\nTo try: {fix}" if fix else problem


_CHECKED = ("items", "number", "attribute", "constant", "shape")  # kinds of changes, the first of which is the cause


@dataclass(slots=True)
class Compilation:
    """How the entry of Thunder's cache came to be that a program belongs to.

    Attributes:
        name: the user's, of what was compiled: a module's class, or a function's qualified name.
        training: the module's mode; None of a function, and of Dynamo's graphs.
        grad: whether gradients were enabled.
        autocast: the dtype of the autocast that was active, such as "bfloat16"; None if none was.
        seconds: from the beginning of Thunder's tracing until the last trace of the entry was partitioned.
        checked: what the prologue checks, by the kind of a change and the user's names: shapes, Python numbers, and
            those that a module has, constants, lengths and keys of lists and dicts.
        parameters: the module's names of parameters and buffers, by their names in the trace.
        attributes: names in the trace of what attributes of modules lead to, such as a mask or a table of angles.
        changes: of the function, shared by all its versions.
        change: because of which it was compiled, if another version differs only in that.
        unreplayed: how many earlier versions differ only in such things, and have not replayed.
        differs: what Thunder computes otherwise than PyTorch, or loses, and where; with and without graphs.
    """

    name: str
    training: bool | None
    grad: bool
    autocast: str | None
    seconds: float = 0.0
    checked: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    attributes: frozenset[str] = frozenset()
    changes: Changes = field(default_factory=Changes)
    change: CallChange | None = None
    unreplayed: int = 0
    differs: list[str] = field(default_factory=list)

    def join(self, earlier: Sequence[tuple[Compilation, int]]) -> None:
        """Joins earlier versions of the function, and finds what has changed since the nearest one.

        Args:
            earlier: each with how often it has replayed.
        """
        if earlier:
            self.changes = earlier[0][0].changes
        alike = [(each, replays) for each, replays in reversed(earlier) if each._kind == self._kind]
        self.unreplayed = sum(not replays for _, replays in alike)
        if alike:
            nearest, _ = min(alike, key=lambda each: differing(self._values, each[0]._values))
            for kind in _CHECKED:
                found = self.changes.add_between(kind, nearest.checked.get(kind, {}), self.checked.get(kind, {}))
                self.change = self.change or found

    def finish(self, seconds: float) -> None:
        """Notes how long the version took."""
        self.seconds = seconds
        if self.change is not None:
            self.change.seconds = seconds

    @property
    def _values(self) -> dict[str, Any]:
        return {name: value for values in self.checked.values() for name, value in values.items()}

    @property
    def _kind(self) -> tuple[object, ...]:
        """What two versions have in common that differ in shapes, numbers and constants only."""
        shapes = self.checked.get("shape", {})
        ranks = tuple((name, len(shape)) for name, shape in shapes.items() if not self._is_item(name))
        others = (name for kind in ("number", "attribute", "constant") for name in self.checked.get(kind, {}))
        named = (name for name in others if not self._is_item(name))
        return self.training, self.grad, self.autocast, ranks, *named, *self.checked.get("items", {})

    def _is_item(self, name: str) -> bool:
        """Whether it is in a list or dict that is checked, so that another version may have none of that name."""
        return any(name.startswith(f"{container}[") for container in self.checked.get("items", {}))
