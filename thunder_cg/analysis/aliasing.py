"""Which values may share memory, which ops write it, and which ops keep their order.

Everything here errs on the safe side. Values that may share memory count as sharing it, and an operator without a rule
may write any tensor that it is given and return a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from thunder_cg.analysis import rules
from thunder_cg.analysis.ops import Op, Ops, Value, op_of
from thunder_cg.analysis.rules import AliasedInputs, Reason
from thunder_cg.compat.thunder import BoundSymbol

_HOLDS_MEMORY = frozenset({"tensor", "future"})
_CHANGES_STATE = frozenset({Reason.SIDE_EFFECT, Reason.RANDOM_STATE, Reason.DTENSOR})  # DTensors may communicate


@dataclass(frozen=True, slots=True)
class Aliasing:
    """The aliasing of one trace. It is computed once and passed on."""

    # The alias set of each tensor (and future): the earliest name of those that may share its memory. Tensors from
    # outside of the trace are told apart by name; see Note [Overlapping arguments] in dependencies.py.
    sets: Mapping[str, str]
    # For each op, the alias sets that it touches: those of its inputs, and of its outputs, which may be views.
    reads: tuple[frozenset[str], ...]
    # For each op, the alias sets that it may write, directly or in its subsymbols. New memory does not count.
    writes: tuple[frozenset[str], ...]
    # Indices of ops that no rule knows. They may write or return any tensor that they are given, and do anything.
    opaque: frozenset[int]
    # Indices of ops that draw, are opaque, communicate or have side effects.
    effects: frozenset[int]
    # Indices of the effects that communicate with other processes, and of those that only wait for such an op.
    collectives: frozenset[int]
    waits: frozenset[int]

    @classmethod
    def of(cls, ops: Ops) -> Aliasing:
        union = _UnionFind(name for name, value in ops.values.items() if value.kind in _HOLDS_MEMORY)
        for op in ops.ops:
            _unite_aliases(op, union, ops.values)
        sets = {name: union.find(name) for name in union.parent}
        reads = [frozenset(sets[name] for name in op.names if name in sets) for op in ops.ops]
        writes = [frozenset(_writes(op, sets)) for op in ops.ops]
        communicate = [op for op in ops.ops if _communicates(op)]
        waits = [op for op in communicate if op.inputs and all(ops.values[n].kind == "future" for n in op.inputs)]
        producer = {name: op.index for op in communicate for name in op.outputs}
        for wait in waits:  # up to here, the collective may still read and write what it was given
            for index in (producer[name] for name in wait.inputs if name in producer):
                reads[wait.index] |= reads[index]
                writes[wait.index] |= writes[index]
        return cls(
            sets=sets,
            reads=tuple(reads),
            writes=tuple(writes),
            opaque=frozenset(op.index for op in ops.ops if is_opaque(op)),
            effects=frozenset(op.index for op in ops.ops if has_effect(op)),
            collectives=frozenset(op.index for op in communicate if op not in waits),
            waits=frozenset(op.index for op in waits),
        )

    def sets_of(self, names: Iterable[str]) -> set[str]:
        """The alias sets of those of the names that hold memory."""
        return {self.sets[name] for name in names if name in self.sets}


def is_opaque(op: Op) -> bool:
    """Whether no rule knows what the op does; see `Aliasing.opaque`."""
    if op.bookkeeping:
        return False
    if op.is_fusion:
        return not rules.executor_rule(op.executor).fuses or any(is_opaque(sub) for sub in op.subs)
    is_made_of_others = op.executor is None and bool(op.subs)
    return op.rule is None and (not is_made_of_others or any(is_opaque(sub) for sub in op.subs))


def has_effect(op: Op) -> bool:
    """Whether the op keeps its order among all ops that have effects; see `Aliasing.effects`."""
    if op.bookkeeping:
        return False
    if (rule := op.rule) is not None:
        if rule.draws or rule.is_collective or rule.cause.reason in _CHANGES_STATE:
            return True
        if any(condition.draws for condition in rule.conditions):  # the inside of the op is not asked
            return any(condition.draws for condition in rule.holding(op.conditions))
    return is_opaque(op) or any(has_effect(sub) for sub in op.subs)


def symbol_has_effect(symbol: BoundSymbol) -> bool:
    """`has_effect` of a symbol of any trace."""
    return has_effect(op_of(symbol))


def symbol_makes_views(symbol: BoundSymbol) -> bool:
    """Whether a symbol of any trace computes nothing, and returns views of its first tensor."""
    return _makes_views(op_of(symbol))


def _makes_views(op: Op) -> bool:
    if op.executor is None and op.subs:
        return all(map(_makes_views, op.subs))
    return op.rule is not None and op.rule.aliases is AliasedInputs.FIRST and not op.rule.launches_kernels


def _communicates(op: Op) -> bool:
    """Whether it is a collective, or waits for one."""
    if op.bookkeeping:
        return False
    return op.rule.is_collective if op.rule is not None else any(map(_communicates, op.subs))


class _UnionFind:
    """Disjoint sets of names, with path halving."""

    def __init__(self, names: Iterable[str]) -> None:
        self.parent = {name: name for name in names}

    def find(self, name: str) -> str:
        parent = self.parent
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    def unite(self, names: Iterable[str]) -> None:
        """The earliest name stays the representative."""
        members = [self.find(name) for name in names]
        for member in members[1:]:
            self.parent[member] = members[0]


def _unite_aliases(op: Op, sets: _UnionFind, values: Mapping[str, Value]) -> None:
    for sub in op.subs:
        _unite_aliases(sub, sets, values)
    which = op.rule.aliased(op.conditions) if op.rule is not None else _assumed(op)
    inputs = [name for name in op.inputs if name in sets.parent]
    outputs = [name for name in op.outputs if name in sets.parent]
    if op.bookkeeping or not outputs:
        return
    if which is AliasedInputs.PAIRWISE and len(inputs) == len(outputs):
        for pair in zip(inputs, outputs):
            sets.unite(pair)
    elif aliased := chosen(which, inputs):
        for names in _by_device((*aliased, *outputs), values):
            sets.unite(names)


def _by_device(names: Iterable[str], values: Mapping[str, Value]) -> list[list[str]]:
    """The tensors on each kind of device, with those of which no device is known: others share no memory."""
    kinds = {name: (values[name].device or "").split(":")[0] for name in names}
    known = {kind: None for kind in kinds.values() if kind} or {"": None}
    return [[name for name in kinds if kinds[name] in ("", kind)] for kind in known]


def _writes(op: Op, sets: Mapping[str, str]) -> Iterator[str]:
    """The alias sets that the op may write."""
    if op.bookkeeping:
        return
    for sub in op.subs:
        yield from _writes(sub, sets)
    which = op.rule.written(op.conditions) if op.rule is not None else _assumed(op)
    yield from chosen(which, [sets[name] for name in op.inputs if name in sets])


def chosen(which: AliasedInputs | None, inputs: list[str]) -> list[str]:
    """Those of an op's inputs that a rule says it aliases or writes."""
    match which:
        case None:
            return []
        case AliasedInputs.FIRST:
            return inputs[:1]
        case AliasedInputs.LAST:
            return inputs[-1:]
    return inputs


def _assumed(op: Op) -> AliasedInputs | None:
    """The inputs that an op without a rule may write or return."""
    executor = rules.executor_rule(op.executor)
    if op.is_fusion:
        return None if executor.fuses else AliasedInputs.ALL
    is_made_of_others = op.executor is None and bool(op.subs)
    if not is_made_of_others and not executor.is_pure:
        return AliasedInputs.ALL
    # In place: it writes its result over its first tensor, as relu_(x) and relu(x, inplace=True) do.
    is_named = op.id is not None and op.id.endswith("_") and not op.id.endswith("__")
    return AliasedInputs.FIRST if is_named or rules.IN_PLACE.name in op.conditions else None
