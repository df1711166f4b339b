"""What a graph of Dynamo's writes in place, with a gradient, written to a copy that is read later in its place.

Thunder loses gradients of what is written through a view, and its ``setitem`` takes no masks and casts nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from thunder_cg.compat.fx import depends_on_autocast, example, operator_name
from thunder_cg.compat.tensors import has_storage, is_wrapper, shares_storage, tree_leaves
from thunder_cg.dynamo import operators
from thunder_cg.dynamo.layouts import fixed_stride
from thunder_cg.dynamo.nodes import (
    arguments,
    call_before,
    call_instead,
    first_argument,
    is_number,
    later,
    result_of,
    use_later,
)
from thunder_cg.dynamo.writes import DRAWS, NEW, is_alike, out_of_place, requires_grad, shares_memory, written_by


def write_to_copy(node: Node, no_grad: frozenset[str], lost: Sequence[torch.Tensor]) -> None:
    """``y[:, 0].add_(z)`` is ``y = y.clone()`` with ``y[:, 0] + z`` written there, and so is ``y[rows] = z``, if the
    graph makes ``y``. What is read later by other names, such as views, is made of the copy.

    Args:
        no_grad: the names of nodes that run under ``torch.no_grad``.
        lost: what is written without a gradient, as through ``y.detach()``, and stays in place.
    """
    target = first_argument(node)
    if not written_by(node) or not isinstance(target, Node) or not requires_grad(example(target)):
        return
    if node.name in no_grad or shares_memory(lost, example(target)):
        return
    if node.target is operator.setitem and _is_there(node):
        node.graph.erase_node(node)
        return
    base, views = _views_of(target)
    tensor, after = example(base), later(node)
    if not has_storage(tensor) or is_wrapper(tensor) or tensor.is_complex():
        return
    names = [each for each in node.graph.nodes if each not in after and shares_storage(example(each), tensor)]
    read = [name for name in names if name is not node and not after.isdisjoint(name.users)]
    is_own = all(name.op.startswith("call") for name in names) and no_grad.isdisjoint(name.name for name in read)
    if not is_own or any(_views_of(name)[0] is not base for name in read):
        return
    is_store = operator_name(node) in _STORE  # the rest is computed out of place without this
    is_laid_out = not operators.reshapes(views) or (fixed_stride(tensor) is not None and tensor.is_contiguous())
    if not is_laid_out or not (is_store or views or {*read} - {base}):
        return
    if (stored := _stored(node, target)) is not None:
        _use_copy(node, base, read, _copy(node, base, views, stored))


def _is_there(put: Node) -> bool:
    """Whether it is the end of ``y[1:] += z``, which Python writes as ``t = y[1:]``, ``t += z``, ``y[1:] = t``."""
    tensor, index, value = put.args
    return isinstance(value, Node) and _view(value) is not None and value.args == (tensor, index)


def _copy(node: Node, base: Node, views: operators.Views, stored: _Stored) -> Node:
    """A copy of what a node writes through views, with what is stored there."""
    copy: Any = stored.value
    if views or not stored.is_fresh:
        args = (base, stored.index, stored.value, views, stored.accumulate)
        copy = call_before(node, operators.write_to_copy(), args, result=example(base))
    copy.meta.update({"example_value": example(base), NEW: True})  # later nodes are known to share memory with it
    return copy


def _use_copy(node: Node, base: Node, read: list[Node], copy: Node) -> None:
    """Has the nodes after one that writes use a copy in the place of a tensor, and views of the copy."""
    of_copy = {base: copy}

    def again(name: Node) -> Node:
        if name not in of_copy:
            source: Any = name.args[0]
            made = again(source)
            with node.graph.inserting_before(node):
                of_copy[name] = node.graph.node_copy(name, lambda arg: made if arg is source else arg)
        return of_copy[name]

    for name in read:
        use_later(node, name, again(name))
    if node.users:  # an operator in place returns its first argument
        node.replace_all_uses_with(again(node.args[0]))  # type: ignore[arg-type]
    node.graph.erase_node(node)


def put_to_copy(node: Node) -> None:
    """``y.index_put((rows,), z)``, of which Thunder has another gradient, is a copy with ``z`` written there."""
    target = first_argument(node)
    stored = _stored(node, target) if isinstance(target, Node) and requires_grad(example(node)) else None
    if stored is not None and stored.is_fresh:
        node.replace_all_uses_with(stored.value)
        node.graph.erase_node(node)
    elif stored is not None:
        call_instead(node, operators.write_to_copy(), target, stored.index, stored.value, (), stored.accumulate)


def _views_of(node: Node) -> tuple[Node, operators.Views]:
    """What a node is a view of, and the views in between."""
    views: list[Any] = []
    while (view := _view(node)) is not None:
        views.append(view)
        node = node.args[0]  # type: ignore[assignment]
    return node, (*reversed(views),)


def _view(node: Node) -> Any:
    """The view that a node makes of its first argument, if `operators.write_to_copy` can make it."""
    name, source = operator_name(node), example(first_argument(node))
    if not isinstance(source, torch.Tensor) or NEW in node.meta or not shares_memory(example(node), source):
        return None
    if example(node) is source and not written_by(node):  # as ``y.contiguous()`` and ``y.real`` may be
        return "getitem", (...,), ()
    is_known = name in operators.VIEWS and node.target in (operator.getitem, name, getattr(torch, name, None))
    view = name, node.args[1:], tuple(node.kwargs.items())
    return view if is_known and all(map(_is_known, tree_leaves(view))) else None


def _is_known(part: Any) -> bool:
    """Whether a part of an index, or another argument of a view, is no tensor and no list of numbers."""
    if isinstance(part, slice):
        return all(map(_is_known, (part.start, part.stop, part.step)))
    return part is None or part is ... or type(part) in (int, str) or (isinstance(part, Node) and is_number(part))


class _Stored(NamedTuple):
    """What is written to a tensor, and where."""

    value: Any
    index: Any = ...
    accumulate: bool = False
    is_fresh: bool = False  # new memory, in the place of the whole tensor


# The arguments of operators that store a value as it is.
_STORE = {
    "copy_": ("target", "value", "non_blocking"),
    "fill_": ("target", "value"),
    **dict.fromkeys(("index_put", "index_put_"), ("target", "indices", "values", "accumulate")),
    "setitem": ("target", "index", "value"),
    "zero_": ("target",),
}


def _stored(node: Node, target: Node) -> _Stored | None:
    """What a node writes to its target, computed out of place; None if that cannot be."""
    tensor, name = example(target), operator_name(node)
    if name not in _STORE:
        function = out_of_place(node) if node.target not in DRAWS else None
        kwargs = {**node.kwargs, "inplace": False} if "inplace" in node.kwargs else node.kwargs
        if function is None:
            return None
        fresh = result_of(function, node.args, kwargs)
        if not is_alike(fresh, tensor) or shares_storage(fresh, tensor):  # `unsqueeze_` writes nothing
            return None
        if depends_on_autocast(node, function):  # which casts nothing in place
            return None
        return _Stored(call_before(node, function, node.args, kwargs, result=fresh), is_fresh=True)

    given = arguments(node, *_STORE[name])
    index = given.pop("indices", given.pop("index", ...))
    value = given.pop("values", given.pop("value", 0.0))
    accumulate = given.pop("accumulate", False)
    for each in ("target", "non_blocking"):
        given.pop(each, None)
    parts = (*index,) if isinstance(index, tuple) or name.startswith("index_put") else (index,)
    indices = [part for part in parts if not _is_known(part)]
    tensors = [*map(example, indices), *([example(value)] if isinstance(value, Node) else [])]
    is_told = not given and (isinstance(value, Node) or type(value) in (bool, int, float))  # no other names
    if not is_told or not all(isinstance(each, torch.Tensor) for each in tensors):
        return None
    if any(each.device != tensor.device or each.is_complex() for each in tensors):
        return None
    kinds = {example(each).dtype for each in indices}
    if kinds <= {torch.int32, torch.int64}:
        is_cast = bool(kinds) and isinstance(value, Node) and example(value).dtype is not tensor.dtype  # by autocast
        return None if is_cast else _Stored(value, parts, accumulate)
    filled = _filled(node, target, parts[0], value) if kinds == {torch.bool} and len(parts) == 1 else None
    return _Stored(filled, is_fresh=True) if filled is not None and not accumulate else None


def _filled(node: Node, target: Node, mask: Node, value: Any) -> Node | None:
    """``y`` after ``y[mask] = value``. None if ``value`` has an element for each that the mask selects, which PyTorch
    counts on the host.
    """
    tensor, shape, known = example(target), example(mask).shape, example(value)
    others = tensor.dim() - len(shape)
    if not shape or shape != tensor.shape[: len(shape)]:
        return None
    sizes = known.shape[: max(known.dim() - others, 0)] if isinstance(known, torch.Tensor) else ()
    if len(sizes) > 1 or not all(type(size) is int and size == 1 for size in sizes):
        return None

    def call(function: Any, *args: Any) -> Node:
        return call_before(node, function, args, result=result_of(function, args))

    if others:
        mask = call(operator.getitem, mask, (..., *[None] * others))
    if not isinstance(known, torch.Tensor):
        filled = call(torch.masked_fill, target, mask, value)
    else:
        value = call(torch.Tensor.to, value, tensor.dtype) if known.dtype is not tensor.dtype else value
        filled = call(torch.where, mask, value, target)
    stride = fixed_stride(tensor)
    is_laid_out = stride is None or result_of(torch.where, (mask, target, target)).stride() == stride
    return filled if is_laid_out else call(operators.laid_out(), filled, stride)  # not as the mask is
