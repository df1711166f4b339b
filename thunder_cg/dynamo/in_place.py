"""What a graph of Dynamo's writes in place, written to new memory, or by symbols that Thunder has."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional as F

from thunder_cg.compat.fx import GET_DATA, compute_with_grad_mode, example, without_gradient
from thunder_cg.compat.splitter import is_differentiable, is_supported
from thunder_cg.compat.tensors import shares_storage, tensors_in
from thunder_cg.compat.thunder import symbols_of_functions
from thunder_cg.dynamo import copies, operators
from thunder_cg.dynamo.nodes import call_before, call_instead, first_argument, later, result_of, use_later
from thunder_cg.dynamo.writes import (
    DRAWS,
    IN_PLACE,
    NEW,
    ancestors,
    is_alike,
    out_of_place,
    requires_grad,
    untracked_writes,
    written_by,
)

_MAKE_NEW = frozenset(
    [
        *(torch.empty, torch.empty_like, torch.zeros, torch.zeros_like, "new_empty", "new_zeros"),
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like),  # they still draw
    ]
)
_NOT_IN_PLACE = frozenset([F.dropout, operator.and_, operator.or_, operator.xor])  # in Thunder


def write_as_thunder_does(graph: Graph, nodes: Sequence[Node], options: dict[str, Any]) -> None:
    """What these nodes write in place is in new memory, or written by symbols that Thunder has."""
    for node in nodes:
        _copy_to_out(node)
        _fill_masked(node)
        _store_tensor(node)
    for node in reversed(nodes):
        _reshape_out_of_place(node)
    for node in nodes:
        _name_inplace(node)
    no_grad, writes = without_gradient(graph), [(node, example(written_by(node))) for node in graph.nodes]
    lost = [each for node, of in writes for each in tensors_in(of) if node.name in no_grad or not each.requires_grad]
    untracked, trains = untracked_writes(graph), any(requires_grad(example(node)) for node in nodes)
    derived: dict[Any, bool] = {}
    for node in nodes:
        if node.name not in untracked:
            copies.write_to_copy(node, no_grad, lost)
            compute_out_of_place(node, has_gradient=trains and node.target not in DRAWS)
            _copy_what_is_written(node, options, derived, trains=trains)


def _copy_to_out(node: Node) -> None:
    """``F.normalize(x, out=y)``, as the spectral norm has it, is ``y.copy_(F.normalize(x))``."""
    out = example(node.kwargs.get("out"))
    if node.target is not F.normalize or not isinstance(out, torch.Tensor) or requires_grad(out):
        return
    kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
    fresh = result_of(F.normalize, node.args, kwargs)
    if is_alike(fresh, out):
        computed = call_before(node, operators.normalize(), node.args, kwargs, result=fresh)
        call_instead(node, torch.Tensor.copy_, node.kwargs["out"], computed)


def _fill_masked(node: Node) -> None:
    """``y[mask] = 0`` is ``y.masked_fill_(mask, 0)``, which a compiler can fuse, and so is ``y[(mask,)] = 0``."""
    if node.target is not operator.setitem:
        return
    index: Any = node.args[1]
    if isinstance(index, tuple) and len(index) == 1 and isinstance(index[0], Node):
        node.args = (node.args[0], index[0], node.args[2])
    tensor, mask = example(node.args[:2])
    is_masked = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.shape == tensor.shape
    if is_masked and type(node.args[2]) in (int, float) and tensor.is_floating_point() and not requires_grad(tensor):
        call_instead(node, torch.Tensor.masked_fill_, *node.args)
        node.meta["example_value"] = tensor


def _store_tensor(node: Node) -> None:
    """``y[index] = 1`` is ``y[index] = torch.full((), 1)``: PyTorch copies the number to the device in each call."""
    if node.target is not operator.setitem or requires_grad(tensor := example(node.args[0])):
        return
    index, number = node.args[1:]
    indices = [example(part) for part in (index if isinstance(index, tuple) else (index,))]
    tensors = [part for part in indices if isinstance(part, torch.Tensor)]
    holds_indices = bool(tensors) and all(each.dtype in (torch.int32, torch.int64) for each in tensors)
    if holds_indices and _fits(number, tensor):
        kwargs = {"dtype": tensor.dtype, "device": tensor.device}
        fresh = call_before(node, torch.full, ((), number), kwargs, result=tensor.new_empty(()))
        node.args = (node.args[0], index, fresh)


_INVERSES: dict[Any, Any] = {
    "t_": torch.t,
    "unsqueeze_": torch.squeeze,
    **dict.fromkeys(("swapaxes_", "swapdims_", "transpose_"), torch.transpose),
}


def _reshape_out_of_place(node: Node) -> None:
    """``x.t_()`` is ``x = x.t()``. Thunder has no such symbol, and Dynamo's example of ``x`` has the shape after it."""
    result, inverse = example(node), _INVERSES.get(node.target) if node.op == "call_method" else None
    if inverse is None or node.kwargs:
        return
    earlier = takewhile(lambda each: each is not node, node.graph.nodes)
    names = [each for each in earlier if example(each) is result]
    if not names or any(not each.op.startswith("call") for each in names):
        return
    before = result_of(inverse, (result, *node.args[1:]))
    node.target = str(node.target).removesuffix("_")
    for name in names:
        name.meta["example_value"] = before
        use_later(node, name, node)


def _name_inplace(node: Node) -> None:
    """``hardswish(x, True)`` is ``hardswish(x, inplace=True)``: modules pass it by position."""
    if not isinstance(node.target, types.FunctionType):
        return
    parameters = [*inspect.signature(node.target).parameters]
    if parameters[-1:] == ["inplace"] and len(node.args) == len(parameters):
        node.kwargs = {**node.kwargs, "inplace": node.args[-1]}
        node.args = node.args[:-1]


def compute_out_of_place(node: Node, *, has_gradient: bool = False) -> None:
    """``y /= y.sum()`` is ``y = y / y.sum()`` for a tensor that the graph makes, and that has no other name later.

    Thunder's backward reads what the operator has overwritten, so its gradients would be wrong. It has no `iand`.
    """
    function, written, result = out_of_place(node), first_argument(node), example(node)
    if function is None or not isinstance(written, Node) or not isinstance(result, torch.Tensor):
        return
    if not (has_gradient or result.requires_grad or function in _NOT_IN_PLACE):
        return
    is_put_back = _is_put_back(node) and not result.requires_grad
    if not is_put_back and _has_other_names(result, (written, node)):
        return
    kwargs = {**node.kwargs, "inplace": False} if "inplace" in node.kwargs else node.kwargs
    if is_alike(result_of(function, node.args, kwargs), result):
        call_instead(node, function, *node.args, **kwargs)
        node.meta[NEW] = True  # its example is what was written: later nodes are known to share memory with that
        use_later(node, written, node)


def _is_put_back(node: Node) -> bool:
    """Whether it is the ``+=`` of ``y[1:] += z``, which Python writes as ``t = y[1:]``, ``t += z``, ``y[1:] = t``."""
    item: Any = node.args[0]
    put: Any = node.next
    is_put = put.target is operator.setitem and item.target is operator.getitem and put.args == (*item.args, node)
    return is_put and node.target in IN_PLACE and [*item.users] == [node] and [*node.users] == [put]


def _copy_what_is_written(node: Node, options: dict[str, Any], derived: dict[Any, bool], *, trains: bool) -> None:
    """``x.sigmoid_()`` is ``x.copy_(x.sigmoid())``, and ``x.fill_(2)`` copies 2 there: Thunder has no such symbols.

    So is ``x.lerp_(y, 0.1)``, which Thunder cannot differentiate, though ``x`` has no gradient.

    Args:
        derived: whether Thunder differentiates operators, as far as is known.
        trains: whether something in the graph has a gradient.
    """
    result = example(node)
    if node.op != "call_method" or not isinstance(result, torch.Tensor) or requires_grad(result):
        return
    is_known = getattr(torch.Tensor, str(node.target), None) in symbols_of_functions()
    if node.target in DRAWS or (is_known and not (trains and result.is_floating_point())):
        return
    fills = node.target == "fill_" and _fits(node.args[-1], result)
    function: Any = torch.full_like if fills else out_of_place(node)
    fresh = result_of(function, node.args, node.kwargs) if function is not None else None
    if fresh is None or not is_alike(fresh, result) or shares_storage(fresh, result):
        return
    computed = call_before(node, function, node.args, node.kwargs, result=fresh)
    if is_known and function not in derived:
        derived[function] = is_differentiable(computed, options)
    if not (is_known and derived[function]) and is_supported(computed, options):
        call_instead(node, torch.Tensor.copy_, node.args[0], computed)
    else:
        node.graph.erase_node(computed)


def keep_gradients(graph: Graph) -> None:
    """After ``w.data.clamp_(0, 1)``, ``w`` is what a symbol has written, and gives its gradient to ``w``.

    Not where old values are read elsewhere, or new ones by another name.
    """
    writes, untracked = untracked_writes(graph), without_gradient(graph)
    for node in graph.nodes:
        if node.name in writes:
            _keep_gradient(node, untracked)


def _keep_gradient(node: Node, untracked: Collection[str]) -> None:
    target, function, after = first_argument(node), out_of_place(node), later(node)
    is_data = isinstance(target, Node) and target.target is GET_DATA
    tensor: Any = target.args[0] if is_data else target
    if function is None or not isinstance(tensor, Node) or (is_data and node.users) or after.isdisjoint(tensor.users):
        return
    made_of = ancestors(node)
    names = [each for each in node.graph.nodes if each not in after and shares_storage(example(each), example(tensor))]
    for name in names:
        for user in name.users.keys() - {node}:
            is_tracked = requires_grad(example(user)) and user.name not in untracked
            is_early = user in made_of and (user.target is operators.overwritten() or not is_tracked)
            if user.op == "output" or not (is_early or (user in after and name in (tensor, node))):
                return
    detached = call_before(node, torch.Tensor.detach, (tensor,), result=result_of(torch.Tensor.detach, (tensor,)))
    args = (detached, *node.args[1:])
    fresh = result_of(function, args, node.kwargs)
    if not is_alike(fresh, example(tensor)):
        return
    values = call_before(node, function, args, node.kwargs, result=fresh)
    use_later(node, tensor, node)
    call_instead(node, operators.overwritten(), tensor, values, is_data)
    node.meta["example_value"] = example(tensor)
    if node.name in untracked:
        compute_with_grad_mode(node, enabled=True)
    for name in (each for each in names if each.target is GET_DATA):
        call_instead(name, torch.Tensor.detach, *name.args)
        if not name.users:
            name.graph.erase_node(name)


def draw_out_of_place(node: Node) -> None:
    """``x.new_empty(...).bernoulli_(p)``, as stochastic depth has it, draws into a tensor that nothing else sees.

    What others see gets a copy of what is drawn: ``noise.normal_()`` of a buffer.
    """
    tensor, *others = *node.args, *node.kwargs.values()
    if not isinstance(tensor, Node) or not all(isinstance(other, (int, float)) for other in others):
        return
    draw, result = operators.drawn(str(node.target)), example(node)
    if [*tensor.users] == [node] and tensor.target in _MAKE_NEW:
        call_instead(node, draw, *node.args, **node.kwargs)
    elif not requires_grad(result) and (fresh := torch.empty_like(result)).stride() == result.stride():
        drawn = call_before(node, draw, node.args, node.kwargs, result=fresh)
        call_instead(node, torch.Tensor.copy_, tensor, drawn)


def _fits(number: Any, tensor: torch.Tensor) -> bool:
    """Whether it is a number that a tensor may hold as it is."""
    return isinstance(number, int) or (isinstance(number, float) and tensor.is_floating_point())


def _has_other_names(tensor: torch.Tensor, known: tuple[Node, ...]) -> bool:
    """Whether the tensor's memory is not the graph's own, or has a name that is not known and is read after the last
    node that is known.
    """
    after = later(known[-1])
    for other in known[0].graph.nodes:
        if shares_storage(example(other), tensor):
            is_read_later = other not in known and other not in after and not after.isdisjoint(other.users)
            if other.op in ("placeholder", "get_attr") or is_read_later:
                return True
    return False
