"""Gradients that are None in PyTorch: those of arguments that nothing a loss was made of depends on.

Thunder gets zeros for the gradients of results that autograd has left undefined, as of hidden states that no loss uses.
So all that only these results depend on would get zeros, and an optimizer with weight decay would change parameters
that it leaves alone without Thunder. What a gradient comes from is known of the trace before Thunder differentiates it.
This is for `thunderfx`: with ``thunder.jit`` the numbers are those of uncaptured Thunder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.gradients import may_have_gradient, plain_id, renames, returned
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.compat.thunder import Proxy, requires_grad

# Their results come from nothing that they get.
_WITHOUT_GRADIENT = frozenset(["detach", "new_empty", "new_full", "new_ones", "new_zeros"])

# Of each argument, by its position, which results its gradient comes from; None of what is not known.
Routes = tuple[frozenset[int] | None, ...]


def results_reached(ops: Ops, aliasing: Aliasing) -> dict[str, frozenset[int]]:
    """Of each argument that requires a gradient, the positions of the results that it reaches.

    What may share memory with what is written counts as written, too, and an operator of which nothing else is known
    passes on all that it gets.

    Args:
        ops: of a trace that Thunder has not differentiated yet.
    """
    wanted = [name for name in ops.args if requires_grad(ops.values[name].proxy)]
    comes = {name: 1 << i for i, name in enumerate(wanted)}  # from which arguments, as bits
    in_memory: dict[str, list[str]] = {}  # the names in each alias set
    for name, memory in aliasing.sets.items():
        in_memory.setdefault(memory, []).append(name)
    for op in ops.ops:
        if op.bookkeeping:
            continue
        _pass_on(op, ops, comes)
        bits = _all_of(op.inputs, comes)
        for memory in aliasing.writes[op.index] if bits else ():
            comes.update({name: comes.get(name, 0) | bits for name in in_memory.get(memory, ())})
    of_results = [comes.get(each.name, 0) if isinstance(each, Proxy) else 0 for each in returned(ops.ops[-1])]
    return {
        name: frozenset(position for position, bits in enumerate(of_results) if bits >> i & 1)
        for i, name in enumerate(wanted)
    }


def routes_of(reached: Mapping[str, frozenset[int]], arguments: Sequence[Any]) -> Routes:
    """What `results_reached` found of the arguments of a forward trace, which autograd ties the results to."""
    return tuple(reached.get(each.name) if isinstance(each, Proxy) else None for each in arguments)


def undefined_too(found: Sequence[Any], routes: Routes, gradients: Sequence[Any]) -> list[Any]:
    """The gradients of the arguments, None for those that come from undefined gradients of the results alone."""
    defined = {i for i, gradient in enumerate(gradients) if gradient is not None}
    return [
        None if route is not None and defined.isdisjoint(route) else gradient for gradient, route in zip(found, routes)
    ]


def _pass_on(op: Op, ops: Ops, comes: dict[str, int]) -> None:
    """Notes what the results of an operator come from."""
    if plain_id(op) in _WITHOUT_GRADIENT:
        return
    if renames(op):
        comes.update({after: comes[before] for before, after in zip(op.inputs, op.outputs) if before in comes})
        return
    outputs = [name for name in op.outputs if may_have_gradient(ops.values[name])]
    known = {*op.inputs}
    inside = dict(comes)
    for sub in op.subs:
        if not known.issuperset(sub.inputs):  # what Thunder calls has names of its own
            break
        known.update(sub.outputs)
        _pass_on(sub, ops, inside)
    else:
        if op.subs and known.issuperset(outputs):
            comes.update({name: inside[name] for name in outputs if name in inside})
            return
    comes.update(dict.fromkeys(outputs, _all_of(op.inputs, comes)))


def _all_of(names: Sequence[str], comes: Mapping[str, int]) -> int:
    return reduce(or_, (comes.get(name, 0) for name in names), 0)


def needed_for(names: Iterable[str], ops: Ops, aliasing: Aliasing) -> list[Op]:
    """The operators of a trace that do more than compute what is not needed for these values."""
    needed, kept = set(names), []
    for op in reversed(ops.ops):
        has_effect = op.bookkeeping or op.index in aliasing.effects or aliasing.writes[op.index]
        if has_effect or not needed.isdisjoint(op.outputs):
            kept.append(op)
            needed.update(() if op.id == "RETURN" else op.inputs)
    return kept[::-1]
