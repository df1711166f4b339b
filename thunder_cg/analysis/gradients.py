"""Gradients that Thunder computes wrongly, with and without graphs.

Note [Gradients of writes in place]
    Thunder differentiates an operator in place as the operator out of place and a copy of its result. Two things get
    lost. What the copy overwrites may be saved for the backward, which then reads the new values. And a tensor that
    shares memory with the one that is written keeps the gradient that it had before the write. PyTorch handles or
    refuses both. They are found in traces: the first in the forward trace that runs, the second in the trace before
    Thunder differentiates it. There, a tensor that is returned by the names that it had before and after a write is
    returned twice, and autograd knows the last of both, while Thunder's backward takes the gradient of the first. A
    write under ``no_grad``, such as a clamp of weights, makes a tensor without a gradient of one that has one. PyTorch
    goes on with the gradient of the one.

Note [Gradients of CPU scalars]
    Thunder takes a 0-dim tensor on the CPU for a number: it combines the tensor with larger ones without a broadcast,
    so nothing sums the gradient. Autograd sums it for an argument of the trace. For a value that the trace has reduced,
    as in ``x - x.mean()``, nobody does. And where such a gradient is added to one of another shape, as of ``x * s`` and
    of ``s.exp()``, that one is broadcast before autograd sums both.

Note [Other derivatives]
    Thunder's derivatives (0.2.6) are not PyTorch's in a few places. Those of complex numbers lack the conjugate, so
    only linear functions with real coefficients are right, and what PyTorch's autograd differentiates for Thunder. What
    such an operator takes in a list gets no gradient, nor do the values of an ``index_put``. An embedding does not
    count a negative ``padding_idx`` from the end, so that row gets a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thunder_cg.analysis.aliasing import Aliasing, chosen
from thunder_cg.analysis.ops import Op, Ops, Value, names_in
from thunder_cg.compat.thunder import (
    LOST_GRADIENT,
    OVERWRITE,
    WITHOUT_GRADIENT,
    is_detached,
    proxy_shape,
    requires_grad,
    tree_flatten_with_dataclass,
)
from thunder_cg.errors import CollectiveError


@dataclass(frozen=True, slots=True)
class WrongGradient:
    """An operator whose gradient is not PyTorch's."""

    operator: str
    line: str | None
    problem: str

    def __str__(self) -> str:
        return f"{self.operator} at {self.line or 'an unknown line'} {self.problem}"

    @property
    def may_leave_no_backward(self) -> bool:
        """Whether a gradient is lost for which the trace then has no backward, if it has no other one."""
        return self.problem.startswith((_OF_ARGUMENT, _UNDER_NO_GRAD))

    def in_thunderfx(self) -> WrongGradient:
        """Without the advice to compile with it."""
        return replace(self, problem=self.problem.replace(_BY_THUNDERFX, ""))


_BY_THUNDERFX = ", or compile with thunder_cg.thunderfx, which corrects or refuses it"
_INSTEAD = f"write out of place{_BY_THUNDERFX}"
_OVERWRITTEN = f"overwrites in place what the backward needs; {_INSTEAD}"
_LOST = f"writes in place to memory that another tensor shares, whose gradient does not see it; {_INSTEAD}"
_TWICE = (
    "writes in place to what is returned twice, by both of its names, and Thunder loses one of the gradients; "
    f"return it once{_BY_THUNDERFX}"
)
_UNDER_NO_GRAD = "writes in place under no_grad"
_WITHOUT_GRAD = (
    f"{_UNDER_NO_GRAD} to what has a gradient, and Thunder loses that gradient; do it outside of what is compiled"
    f"{_BY_THUNDERFX}"
)
_OF_ARGUMENT = "writes in place to an argument"
_ARGUMENT = f"{_OF_ARGUMENT}, whose gradient does not see it; {_INSTEAD}"
_PUT_OFF = f"writes in place to what the caller sees, and Thunder puts that off to the backward; {_INSTEAD}"
_OTHER = (
    "has another gradient in Thunder than in PyTorch; compile with thunder_cg.thunderfx, which leaves it to Inductor"
)
_NOT_SUMMED = (
    "combines a 0-dim tensor on the CPU with a larger one, and Thunder does not sum its gradient; give it a dimension, "
    "as with keepdim=True, or use a GPU"
)


# Prims that are right for complex numbers: see Note [Other derivatives].
_LINEAR = {
    *("ABS", "ADD", "BROADCAST_IN_DIM", "CAT", "CLONE", "CONVERT_ELEMENT_TYPE", "COPY_", "CUMSUM", "DEVICE_PUT"),
    *("FLIP", "GATHER", "INDEX_ADD", "NEG", "RESHAPE", "SCATTER_ADD", "SHALLOW_COPY", "SLICE", "SQUEEZE"),
    *("STRIDE_ORDER", "SUB", "SUM", "TAKE", "TAKE_ALONG_AXIS", "TRANSPOSE", "WHERE"),
}


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """One way to see a piece of memory. Names of one tensor before and after a write are one view."""

    base: _View | None
    nbytes: int  # 0 if unknown

    def overlaps(self, other: _View) -> bool:
        """Whether both surely share elements: one is a view of the other, or one is all of the memory."""
        mine, others = [*self._bases()], [*other._bases()]
        if mine[-1] is not others[-1]:
            return False
        return other in mine or self in others or self.is_whole or other.is_whole

    def _bases(self) -> Iterator[_View]:
        view: _View | None = self
        while view is not None:
            yield view
            view = view.base

    @property
    def is_whole(self) -> bool:
        """Whether it shows all of the memory that is known of."""
        return 0 < self.nbytes == self.memory.nbytes

    @property
    def memory(self) -> _View:
        """The view of all of the memory that is known of."""
        return [*self._bases()][-1]


class _Views:
    """The view of each name, as ops are added in the order of the trace."""

    def __init__(self, ops: Ops, aliasing: Aliasing) -> None:
        self._values, self._sets = ops.values, aliasing.sets
        self._members: dict[str, dict[str, _View]] = {}  # by alias set

    def of(self, name: str) -> _View:
        members = self._members.setdefault(self._sets[name], {})
        if name not in members:
            members[name] = _View(None, self._values[name].nbytes)
        return members[name]

    def in_memory_of(self, name: str) -> list[str]:
        """Names of the same alias set."""
        return [*self._members.get(self._sets[name], ())]

    def add(self, op: Op, written: Sequence[str]) -> None:
        """Notes of which tensors the op's outputs are views. What an op in place returns is what it wrote."""
        for i, name in enumerate(op.outputs):
            if name not in self._sets or name in self._members.get(self._sets[name], ()):
                continue
            aliased = [each for each in op.inputs if self._sets.get(each) == self._sets[name]]
            same = op.inputs[i : i + 1] if renames(op) else [each for each in aliased if each in written]
            base = self.of(aliased[0]) if aliased else None
            view = self.of(same[0]) if same else _View(base, self._values[name].nbytes)
            self._members.setdefault(self._sets[name], {})[name] = view


def overwritten(ops: Ops, aliasing: Aliasing, saved: Collection[str]) -> tuple[WrongGradient, ...]:
    """Writes to memory of what a forward trace has saved for its backward, after that was made.

    Args:
        saved: names of the saved values.
    """
    views = _Views(ops, aliasing)
    alive = [views.of(name) for name in saved if name in aliasing.sets and name in ops.args]
    lost = []
    for op in _without_fusions(ops.ops):
        written = [name for name in _written(op) if name in aliasing.sets]
        views.add(op, written)
        targets = [views.of(name) for name in written]
        if any(view.overlaps(target) for view in alive for target in targets):
            lost.append(_named(op, ops, _OVERWRITTEN))
        alive += [views.of(name) for name in op.outputs if name in saved and name in aliasing.sets]
    return tuple(dict.fromkeys(lost))


def put_off(ops: Ops, aliasing: Aliasing, seen: Collection[str]) -> tuple[WrongGradient, ...]:
    """Writes of the user's forward that Thunder has moved to its backward.

    Args:
        ops: of a backward trace.
        seen: names of the forward in memory that its caller sees.
    """
    argument_sets = aliasing.sets_of(name for op in ops.ops if op.bookkeeping for name in op.outputs if name in seen)
    found = [op for op in _without_fusions(ops.ops) if not argument_sets.isdisjoint(aliasing.sets_of(_written(op)))]
    return tuple(dict.fromkeys(_named(op, ops, _PUT_OFF) for op in found))


def lost_or_unsummed(ops: Ops, aliasing: Aliasing) -> tuple[WrongGradient, ...]:
    """Writes whose effect on other tensors Thunder does not see, and gradients of CPU scalars that it does not sum.

    Args:
        ops: of a trace that Thunder has not differentiated yet.
    """
    gradients = _Gradients(ops, aliasing)
    for op in ops.ops:
        gradients.add(op)
    unsummed = (_named(op, ops, _NOT_SUMMED) for op in _added_before_they_are_summed(ops, gradients.tracked))
    return tuple(dict.fromkeys([*gradients.wrong, *unsummed]))


class _Gradients:
    """What has a gradient, and what is wrong with that in Thunder, as ops are added in the order of the trace."""

    def __init__(self, ops: Ops, aliasing: Aliasing) -> None:
        self._ops, self._sets, self._views = ops, aliasing.sets, _Views(ops, aliasing)
        self.tracked = {name for name in ops.args if requires_grad(ops.values[name].proxy)}  # what has a gradient
        self._arguments = [self._views.of(name) for name in ops.args if name in self._sets]
        self._stale: dict[str, WrongGradient] = {}  # names whose gradient does not see a write, and the write
        self._reduced: set[str] = set()  # CPU scalars that were made of larger tensors
        self.wrong: list[WrongGradient] = []

    def add(self, op: Op) -> None:
        written = [name for name in _written(op) if name in self._sets]
        self._views.add(op, written)
        if renames(op):
            for before, after in zip(op.inputs, op.outputs):
                self.tracked.update([after] if before in self.tracked else [])
                self._stale.update({after: self._stale[before]} if before in self._stale else {})
        elif op.bookkeeping:
            self._return(op)
        else:
            self._compute(op, [] if any(sub.id == OVERWRITE for sub in op.subs) else written)

    def _read(self, names: Iterable[str]) -> None:
        self.wrong += [self._stale[name] for name in names if name in self._stale]

    def _return(self, op: Op) -> None:
        results = returned(op)
        self._read(names_in(results))
        # Thunder returns once what has one name. So what it returns twice has had two, before and after a write.
        counts = Counter(name for result in results for name in names_in([result]) if name in self.tracked)
        if twice := {name for name, count in counts.items() if count > 1}:
            makers = (each for each in self._ops.ops if not each.bookkeeping and not twice.isdisjoint(each.outputs))
            self.wrong += [_named(each, self._ops, _TWICE) for each in makers]

    def _compute(self, op: Op, written: Sequence[str]) -> None:
        ops, tracked, views = self._ops, self.tracked, self._views
        if _follow(op, ops, tracked, self._reduced):
            self.wrong.append(_named(op, ops, _NOT_SUMMED))
        if tracked.isdisjoint(op.inputs) or tracked.isdisjoint(op.outputs):
            if not tracked.isdisjoint(written):
                self._stale |= dict.fromkeys(op.outputs, _named(op, ops, _WITHOUT_GRAD))
                tracked.update(op.outputs)
            return
        self._read(op.inputs)
        if (op.id or "").endswith(WITHOUT_GRADIENT):
            raise CollectiveError(f"{op.name.rsplit('.', 1)[-1]} {ops.place(op)}", *LOST_GRADIENT)
        if _has_another_gradient(op, ops, tracked):
            self.wrong.append(_named(op, ops, _OTHER))
        outputs = [name for name in op.outputs if name in tracked and name in self._sets]
        if written and any(views.of(name).memory in self._arguments for name in outputs):
            self.wrong.append(_named(op, ops, _ARGUMENT))
        for name in written:
            shared = [each for each in views.in_memory_of(name) if _is_changed(views.of(each), views.of(name), op)]
            self._stale |= dict.fromkeys(shared, _named(op, ops, _LOST))
            tracked.update(shared)


def _has_another_gradient(op: Op, ops: Ops, tracked: set[str]) -> bool:
    """See Note [Other derivatives].

    Args:
        tracked: names that have a gradient, those that the op makes included.
    """
    if op.id == "torch.nn.functional.embedding":
        padding = op.symbol.args[2] if len(op.symbol.args) > 2 else op.symbol.kwargs.get("padding_idx")
        return isinstance(padding, int) and padding < 0
    if plain_id(op) == "index_put":
        return True
    if not op.subs and not _is_prim(op):
        return not names_in([arg for arg in op.symbol.args if isinstance(arg, (list, tuple))]).isdisjoint(tracked)
    return any(_lacks_conjugate(prim, ops, tracked) for prim in _prims(op))


def _lacks_conjugate(prim: Op, ops: Ops, tracked: set[str]) -> bool:
    is_derived = _is_prim(prim) and not (tracked.isdisjoint(prim.inputs) or tracked.isdisjoint(prim.outputs))
    is_complex = any((ops.values[name].dtype or "").startswith("complex") for name in prim.names)
    numbers = [isinstance(arg, (int, float, complex)) and complex(arg).imag == 0 for arg in prim.symbol.args]
    is_scaled = (prim.id == "MUL" and any(numbers)) or (prim.id == "DIV" and numbers[-1])
    return is_derived and is_complex and prim.id not in _LINEAR and not is_scaled


def _is_prim(op: Op) -> bool:
    """Whether Thunder derives it itself. The name of a prim is that of a constant."""
    return (op.id or "").isupper()


def _added_before_they_are_summed(ops: Ops, tracked: Collection[str]) -> Iterator[Op]:
    """Where gradients of a CPU scalar meet that have different shapes: see Note [Gradients of CPU scalars].

    Args:
        tracked: names that have a gradient.
    """
    shapes: dict[str, set[tuple[Any, ...]]] = {name: {()} for name in names_in(returned(ops.ops[-1]))}  # of gradients
    for op in reversed(ops.ops):
        for prim in reversed([*_prims(op)]):
            outputs = [name for name in prim.outputs if name in shapes and may_have_gradient(ops.values[name])]
            comes: set[tuple[Any, ...]] = set()
            for name in outputs:
                shape = proxy_shape(ops.values[name].proxy)
                is_summed = len(prim.inputs) == 1 or not _is_prim(prim)  # as the gradient of a broadcast, or PyTorch's
                comes |= shapes[name] if _is_cpu_scalar(ops.values[name]) else {() if is_summed else shape}
            for name in prim.inputs if outputs else ():
                is_new = not comes <= shapes.setdefault(name, set())
                shapes[name] |= comes
                if is_new and len(shapes[name]) > 1 and name in tracked and _is_cpu_scalar(ops.values[name]):
                    yield op


def _follow(op: Op, ops: Ops, tracked: set[str], reduced: set[str]) -> bool:
    """Adds what the prims of an operator make to the names that have a gradient, and to the reduced CPU scalars.

    Returns:
        whether Thunder does not sum a gradient: see Note [Gradients of CPU scalars].
    """
    is_unsummed = False
    for prim in _prims(op):
        read = [name for name in prim.inputs if name in tracked]
        outputs = [name for name in prim.outputs if may_have_gradient(ops.values[name])]
        if not read or not outputs:
            continue
        tracked.update(outputs)
        values = [ops.values[name] for name in (*prim.inputs, *outputs)]
        shapes = {proxy_shape(value.proxy) for value in values if value.kind == "tensor"}
        is_mixed = len(shapes) == 2 and () in shapes and len(prim.inputs) > 1 and _is_prim(prim)
        is_unsummed = is_unsummed or (is_mixed and not reduced.isdisjoint(read))
        is_reduced = any(name in reduced or proxy_shape(ops.values[name].proxy) for name in read)
        reduced.update(name for name in outputs if is_reduced and _is_cpu_scalar(ops.values[name]))
    return is_unsummed


def _prims(op: Op) -> Iterator[Op]:
    """The prims of an operator that may have a gradient."""
    if op.bookkeeping or plain_id(op) == "detach":
        return
    if not op.subs:
        yield op
    for sub in op.subs:
        yield from _prims(sub)


def _is_cpu_scalar(value: Value) -> bool:
    return value.device == "cpu" and proxy_shape(value.proxy) == ()


def _is_changed(view: _View, written: _View, op: Op) -> bool:
    """Whether a write through another view surely changes this one. An assignment to items may spare most of them."""
    spares = plain_id(op) == "setitem" and not view.is_whole
    return view is not written and not spares and view.overlaps(written)


def _named(op: Op, ops: Ops, problem: str) -> WrongGradient:
    return WrongGradient(op.name, ops.line(op), problem)


def plain_id(op: Op) -> str:
    """``add`` of ``torch.Tensor.add_``."""
    return (op.id or "").rsplit(".", 1)[-1].strip("_")


def renames(op: Op) -> bool:
    """Whether it gives tensors new names, one for each, because their memory has been written."""
    return op.id in ("UPDATE_ALIASES", "update_aliases")


def _written(op: Op) -> Iterator[str]:
    """Names of inputs that the op surely writes."""
    if op.bookkeeping:
        return
    if op.rule is not None and (op.executor is not None or not op.subs):
        yield from chosen(op.rule.written(op.conditions), [*op.inputs])
    else:  # Thunder's own operators are made of others
        yield from {name for sub in op.subs for name in _written(sub) if name in op.inputs}


def _without_fusions(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield from _without_fusions(op.subs) if op.is_fusion else [op]


def returned(op: Op) -> Sequence[Any]:
    """The leaves of what a trace returns to its caller."""
    data = op.symbol.args[0] if op.id == "RETURN" and op.symbol.args else None
    leaves, _ = tree_flatten_with_dataclass(data.get("output") if isinstance(data, dict) else data)
    return leaves


def may_have_gradient(value: Value) -> bool:
    is_float = value.dtype is not None and value.dtype.startswith(("float", "bfloat", "complex"))
    return is_float and not is_detached(value.proxy)
