"""Who may share memory with whom, who writes it, and whose order counts.

Everything here errs on the safe side: what may share does share, and an operator that no rule knows may write any
tensor it is given and return a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from thunder_cg.analysis import rules
from thunder_cg.analysis.ops import Op, Ops, Value
from thunder_cg.analysis.rules import Sharing

__all__ = ["alias_sets", "has_effect", "is_opaque", "reads", "writes"]

_HOLDS_MEMORY = frozenset({"tensor", "future"})


def alias_sets(ops: Ops) -> dict[str, str]:
    """Maps each tensor (and future) to the representative of those that may share its memory.

    Tensors from outside of the trace are told apart by name; see Note [Overlapping arguments] in partition.py.
    """
    classes = _Classes(name for name, value in ops.values.items() if value.kind in _HOLDS_MEMORY)
    for op in ops.ops:
        _share(op, ops.values, classes)
    return classes.alias_sets()


def reads(op: Op, roots: Mapping[str, str]) -> frozenset[str]:
    """Roots that the op touches at all: those of its inputs, and of its outputs, which may be views of older memory."""
    return frozenset(roots[name] for name in (*op.inputs, *op.outputs) if name in roots)


def writes(op: Op, roots: Mapping[str, str]) -> frozenset[str]:
    """Roots that the op may write, in itself or in what it is made of. Fresh memory that it returns does not count.

    Args:
        op: Any op, or an op inside of a fusion.
        roots: What :func:`roots` returned for its trace.
    """
    return frozenset(_writes(op, roots))


def is_opaque(op: Op) -> bool:
    """Does no rule know what it does? Then it may write or return any tensor that it is given, and do anything."""
    if op.bookkeeping:
        return False
    if op.is_fusion:
        return op.executor not in rules.FUSION_EXECUTORS or any(is_opaque(sub) for sub in op.subs)
    key = rules.find(op.executor, op.id)
    if key in rules.ALLOW or key in rules.DENY:
        return False
    if op.executor is not None or not op.subs:
        return True
    return any(is_opaque(sub) for sub in op.subs)


def has_effect(op: Op) -> bool:
    """Does the op belong to the one order of random draws, opaque operators, collectives and side effects?"""
    if op.bookkeeping:
        return False
    key = rules.find(op.executor, op.id)
    if key in rules.RANDOM or key in rules.COLLECTIVES or rules.RANDOM_IF.get(key) in op.traits:
        return True
    denied = rules.DENY.get(key)
    if denied is not None and denied.reason in (rules.Reason.SIDE_EFFECT, rules.Reason.RANDOM_STATE):
        return True
    return is_opaque(op) or any(has_effect(sub) for sub in op.subs if key not in rules.RANDOM_IF)


class _Classes:
    """Union-find over names, with path halving."""

    def __init__(self, names: Iterable[str]) -> None:
        self.parent = {name: name for name in names}

    def root(self, name: str) -> str:
        parent = self.parent
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    def unite(self, names: Iterable[str]) -> None:
        """The earliest name stays the representative."""
        members = [self.root(name) for name in names]
        for member in members[1:]:
            self.parent[member] = members[0]

    def alias_sets(self) -> dict[str, str]:
        return {name: self.root(name) for name in self.parent}


def _share(op: Op, values: Mapping[str, Value], classes: _Classes) -> None:
    for sub in op.subs:
        _share(sub, values, classes)
    if op.bookkeeping:
        return
    inputs = [name for name in op.inputs if values[name].kind in _HOLDS_MEMORY]
    outputs = [name for name in op.outputs if values[name].kind in _HOLDS_MEMORY]
    for group in _shared(op, inputs, outputs):
        classes.unite(group)


def _shared(op: Op, inputs: list[str], outputs: list[str]) -> Iterator[Iterable[str]]:
    if not inputs or not outputs:
        return
    key = rules.find(op.executor, op.id)
    sharing = _said_by_traits(op, rules.VIEWS_IF.get(key, {})) or rules.VIEWS.get(key)
    if sharing is None and op.executor not in rules.PURE_EXECUTORS and not op.is_fusion and _is_opaque_leaf(op):
        sharing = Sharing.ALL
    if op.is_fusion and op.executor not in rules.FUSION_EXECUTORS:
        sharing = Sharing.ALL
    if sharing is None and _is_in_place(op):
        sharing = Sharing.FIRST
    match sharing:
        case Sharing.PAIRWISE if len(inputs) == len(outputs):
            yield from zip(inputs, outputs)
        case Sharing.FIRST:
            yield (inputs[0], *outputs)
        case Sharing.LAST:
            yield (inputs[-1], *outputs)
        case Sharing.ALL | Sharing.PAIRWISE:
            yield (*inputs, *outputs)


def _said_by_traits(op: Op, row: Mapping[str, Sharing]) -> Sharing | None:
    return next((sharing for trait, sharing in row.items() if trait in op.traits), None)


def _is_opaque_leaf(op: Op) -> bool:
    """Unknown, and not made of subsymbols that are looked at on their own."""
    key = rules.find(op.executor, op.id)
    return key not in rules.ALLOW and key not in rules.DENY and (op.executor is not None or not op.subs)


def _writes(op: Op, roots: Mapping[str, str]) -> Iterator[str]:
    if op.bookkeeping:
        return
    for sub in op.subs:
        yield from _writes(sub, roots)
    inputs = [name for name in op.inputs if name in roots]
    if not inputs:
        return
    match _written(op):
        case Sharing.FIRST:
            yield roots[inputs[0]]
        case Sharing.LAST:
            yield roots[inputs[-1]]
        case Sharing.ALL | Sharing.PAIRWISE:
            yield from (roots[name] for name in inputs)


def _written(op: Op) -> Sharing | None:
    key = rules.find(op.executor, op.id)
    if (sharing := _said_by_traits(op, rules.WRITES_IF.get(key, {}))) is not None:
        return sharing
    if key in rules.WRITES:
        return rules.WRITES[key]
    if op.is_fusion:
        return None if op.executor in rules.FUSION_EXECUTORS else Sharing.ALL
    if _is_opaque_leaf(op) and op.executor not in rules.PURE_EXECUTORS:
        return Sharing.ALL
    return Sharing.FIRST if _is_in_place(op) else None


def _is_in_place(op: Op) -> bool:
    """Does it write its result over its first tensor, as ``relu_(x)`` and ``relu(x, inplace=True)`` do?"""
    return "inplace" in op.traits or (op.id is not None and op.id.endswith("_") and not op.id.endswith("__"))
