"""What is written differently in a graph of Dynamo's, so that Thunder can trace it. The values are the same bits."""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional as F

from thunder_cg.compat.splitter import (
    GET_DATA,
    can_trace,
    can_trace_all,
    checkpoints,
    compute_without_gradient,
    depends_on_autocast,
    example,
    fixed_float,
    for_splitter,
    inside_transforms,
    is_collective,
    is_differentiable,
    is_for_splitter,
    is_number_of_numpys,
    is_supported,
    is_unused,
    is_wait,
    known_constant,
    numpy_name,
    on_examples,
    operator_name,
    read_number,
    symbols_of_sizes,
    without_gradient,
)
from thunder_cg.compat.thunder import symbols_of_functions
from thunder_cg.compat.torch import (
    any_autocast_enabled,
    library_name,
    parameters_of,
    shares_storage,
    tensors_in,
    tree_leaves,
)
from thunder_cg.dynamo import operators
from thunder_cg.dynamo.fallbacks import has_another_derivative, returns_cpu_scalar
from thunder_cg.dynamo.layouts import LIKE, fixed_stride, lay_out_before_strides, layout_counts, make_as_laid_out
from thunder_cg.dynamo.writes import (
    IN_PLACE,
    is_named_in_place,
    requires_grad,
    shares_memory,
    untracked_writes,
    written_by,
)

# Names of arguments that Thunder's operators do not have: PyTorch's own, and those of NumPy, which PyTorch takes, too.
_UNKNOWN = frozenset(
    [
        "condition",
        "dims",
        "input",
        "repeats",
        "shape",
        "size",
        "split_size",
        "split_size_or_sections",
        "tensor",
        "tensors",
        "weight",
    ]
)
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


def _truncated(number: Any) -> Any:
    return math.floor(number) if number >= 0 else math.ceil(number)


# Dynamo's names of Python's functions where a number may change, which Thunder does not know.
_OF_NUMBERS: dict[Any, Callable[..., Any]] = {
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_sum: for_splitter(sum, "sum"),
    torch.sym_int: for_splitter(_truncated, "int"),
    torch.sym_float: for_splitter(lambda number: number / 1, "float"),
}


_NEW = "thunder_cg.new"  # of nodes whose results are in new memory, unlike their examples
_SLICES = 8  # up to as many, a list of numbers is written as slices
_ARITHMETIC = frozenset([torch.add, torch.div, torch.floor_divide, torch.mul, torch.remainder, torch.sub])
_ARITHMETIC |= {operator.add, operator.floordiv, operator.mul, operator.sub, operator.truediv}
_MAKE_NEW = frozenset([torch.empty, torch.empty_like, torch.zeros, torch.zeros_like, "new_empty", "new_zeros"])
_TAKE_SIZES = frozenset(["as_strided", "expand", "new_empty", "new_ones", "new_zeros", "repeat", "reshape", "view"])


def rewrite(module: GraphModule, options: dict[str, Any], *, is_checkpointed: bool = False) -> None:
    """Rewrites the graph in place.

    Args:
        options: those of ``thunder.jit`` that the graph is to be compiled with.
        is_checkpointed: whether it is the graph of a checkpointed function, of which Inductor gets all or nothing.
    """
    for node in module.graph.find_nodes(op="call_method", target="item"):
        _write_number(node)
    _detach_data(module.graph)
    _read_sizes_first(module.graph)
    for call in checkpoints(module.graph):
        _rewrite_checkpointed(call, module, options)
    _give_autograd_functions_what_they_use(module)
    transformed = inside_transforms(module.graph)
    _write_constants(module.graph, transformed)
    for node in [node for node in module.graph.nodes if node.name not in transformed]:
        _copy_to_out(node)
        _fill_masked(node)
    nodes = [node for node in module.graph.nodes if node.name not in transformed]
    _write_as_thunder_does(module.graph, nodes, options)
    for node in nodes:
        _name_as_thunder_does(node)
        _pass_by_position(node)
    for node in nodes:
        if node.op == "call_function" and node.target is torch.cat:
            _drop_empty_parts(node)
        elif node.op == "call_function" and node.target is operator.getitem:
            _clamp_slices(node)
            _slice_for_list(node)
        elif node.target is torch.cuda.get_device_capability and not node.users:  # Dynamo has used its result already
            module.graph.erase_node(node)
        elif _is_size(node):
            _write_out(node)
        elif node.target in _OF_NUMBERS and isinstance(_value(node), (int, float, torch.SymInt, torch.SymFloat)):
            node.target = _OF_NUMBERS[node.target]
        elif node.target in (torch.tensor, torch.as_tensor):
            _make_of_numbers(node)
        elif node.target in LIKE:
            make_as_laid_out(node)
        elif node.target in ("norm", torch.norm):
            _name_vector_norm(node)
        elif node.target is torch.einsum:
            _pass_each_operand(node)
        elif node.target is F.embedding:
            _count_padding_from_start(node)
        elif node.op == "call_method" and node.target in _METHODS:
            _METHODS[node.target](node)
        elif node.target is torch.ops.higher_order.autograd_function_apply and not is_checkpointed:
            _write_as_before(node, module, options)
        elif is_collective(node):
            _wait_in_trace(node, options)
        elif node.op.startswith("call"):
            _use_own_operator(node, options)
    lay_out_before_strides(module.graph)
    _leave_out_of_backward(module.graph, transformed, options)


def _write_as_thunder_does(graph: Graph, nodes: Sequence[Node], options: dict[str, Any]) -> None:
    """What these nodes write in place is in new memory, or written by symbols that Thunder has."""
    for node in reversed(nodes):
        _reshape_out_of_place(node)
    for node in nodes:
        _name_inplace(node)
    untracked, trains = untracked_writes(graph), any(requires_grad(_value(node)) for node in nodes)
    for node in nodes:
        if node.name not in untracked:
            _compute_out_of_place(node, has_gradient=trains and node.target not in _METHODS)
            _write_slice_as_item(node)
            _copy_what_is_written(node, options)


def _rewrite_checkpointed(call: Node, module: GraphModule, options: dict[str, Any]) -> None:
    """Rewrites a checkpointed function, which is a graph of its own.

    Its constants go there: Thunder takes tensors and numbers of the graph alone. What is checkpointed inside of it is
    written out, and so is the function if there is no gradient.
    """
    function: Any = call.args[0]
    body: Any = module.get_submodule(function.target)
    for placeholder, arg in zip(body.graph.find_nodes(op="placeholder"), call.args[1:]):
        if not isinstance(arg, Node):
            _replace(placeholder, arg)
    call.args = (function, *(arg for arg in call.args[1:] if isinstance(arg, Node)))
    for inner in checkpoints(body.graph):
        _rewrite_checkpointed(inner, body, options)
    for inner in checkpoints(body.graph):
        _write_out_checkpointed(inner, body)
    calls = [node for node in body.graph.nodes if node.op.startswith("call")]
    if any(requires_grad(_value(node)) for node in calls):
        rewrite(body, options, is_checkpointed=True)
        body.recompile()
    elif not body.graph.find_nodes(op="get_attr"):
        _write_out_checkpointed(call, module)


def _write_out_checkpointed(call: Node, module: GraphModule) -> None:
    function: Any = call.args[0]
    body: Any = module.get_submodule(function.target)
    values: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:]))
    with call.graph.inserting_before(call):
        results: Any = call.graph.graph_copy(body.graph, values)
    for item in [*call.users]:
        item.replace_all_uses_with(results[item.args[1]])
        call.graph.erase_node(item)
    call.graph.erase_node(call)
    if not function.users:
        call.graph.erase_node(function)


def _write_number(node: Node) -> None:
    """Dynamo reads a float that changes from call to call from a tensor, also where it compiles for each value."""
    if (number := fixed_float(node)) is not None:
        _replace(node, number)


def _read_sizes_first(graph: Graph) -> None:
    """A number of NumPy's is read before a tensor has the size that it holds, as PyTorch's split of a graph wants it.

    Dynamo passes a number of the user's as a tensor: ``x.new_zeros(n)`` takes it as it is, and ``x[:n]`` reads it.
    """
    placeholders = graph.find_nodes(op="placeholder")
    read: dict[Any, Node] = {}
    for node in [*graph.nodes]:
        if numpy_name(node) == "numpy.item" and isinstance(_value(node), torch.SymInt) and node.args:
            read[node.args[0]] = node
            _after(node.args[0], placeholders).append(node)
        elif not symbols_of_sizes(node) <= symbols_of_sizes(*placeholders):
            for number in filter(is_number_of_numpys, node.all_input_nodes):
                if number not in read:
                    with graph.inserting_after(_after(number, placeholders)):
                        read[number] = read_number(number)
                node.replace_input_with(number, read[number])


def _after(node: Node, placeholders: Sequence[Node]) -> Node:
    return placeholders[-1] if node in placeholders else node


def _name_inplace(node: Node) -> None:
    """``hardswish(x, True)`` is ``hardswish(x, inplace=True)``: modules pass it by position."""
    if not isinstance(node.target, types.FunctionType):
        return
    parameters = [*inspect.signature(node.target).parameters]
    if parameters[-1:] == ["inplace"] and len(node.args) == len(parameters):
        node.kwargs = {**node.kwargs, "inplace": node.args[-1]}
        node.args = node.args[:-1]


_INVERSES: dict[Any, Any] = {
    "t_": torch.t,
    "unsqueeze_": torch.squeeze,
    **dict.fromkeys(("swapaxes_", "swapdims_", "transpose_"), torch.transpose),
}


def _reshape_out_of_place(node: Node) -> None:
    """``x.t_()`` is ``x = x.t()``. Thunder has no such symbol, and Dynamo's example of ``x`` has the shape after it."""
    result, inverse = _value(node), _INVERSES.get(node.target) if node.op == "call_method" else None
    later = _later(node) if inverse is not None else set()
    names = [each for each in node.graph.nodes if each is not node and each not in later and _value(each) is result]
    if inverse is None or not names or node.kwargs or any(not each.op.startswith("call") for each in names):
        return
    before = on_examples(inverse, (result, *node.args[1:]), {})
    node.target = str(node.target).removesuffix("_")
    for name in names:
        name.meta["example_value"] = before
        for user in later.intersection(name.users):
            user.replace_input_with(name, node)


def _copy_to_out(node: Node) -> None:
    """``F.normalize(x, out=y)``, as the spectral norm has it, is ``y.copy_(F.normalize(x))``."""
    out = _value(node.kwargs.get("out"))
    if node.target is not F.normalize or not isinstance(out, torch.Tensor) or requires_grad(out):
        return
    kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
    fresh = on_examples(F.normalize, example(node.args), example(kwargs))
    if (fresh.shape, fresh.dtype) != (out.shape, out.dtype):
        return
    with node.graph.inserting_before(node):
        computed = node.graph.call_function(operators.normalize(), node.args, kwargs)
    computed.meta.update(node.meta, example_value=fresh)
    node.op, node.target, node.args, node.kwargs = "call_method", "copy_", (node.kwargs["out"], computed), {}


def _fill_masked(node: Node) -> None:
    """``y[mask] = 0`` is ``y.masked_fill_(mask, 0)``, which does not read the mask on the host."""
    if node.target is not operator.setitem:
        return
    tensor, mask = example(node.args[:2])
    is_masked = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.shape == tensor.shape
    if is_masked and type(node.args[2]) in (int, float) and tensor.is_floating_point() and not requires_grad(tensor):
        node.op, node.target = "call_method", "masked_fill_"
        node.meta["example_value"] = tensor


def _compute_out_of_place(node: Node, *, has_gradient: bool = False) -> None:
    """``y /= y.sum()`` is ``y = y / y.sum()`` for a tensor that the graph makes, and that has no other name later.

    Thunder's backward reads what the operator has overwritten, so its gradients would be wrong. Its dropout refuses.
    """
    function = _out_of_place(node)
    written = node.args[0] if node.args else None
    result = _value(node)
    if function is None or not isinstance(written, Node) or not isinstance(result, torch.Tensor):
        return
    if not (has_gradient or result.requires_grad or function is F.dropout):
        return
    later = _later(node)
    if not _is_put_back(node) and _has_other_names(result, later, (written, node)):
        return
    kwargs = {**node.kwargs, "inplace": False} if "inplace" in node.kwargs else node.kwargs
    fresh = on_examples(function, example(node.args), example(kwargs))
    if (fresh.dtype, fresh.shape) != (result.dtype, result.shape):
        return
    node.op, node.target = _called(function)
    node.kwargs = kwargs
    node.meta[_NEW] = True  # its example is what was written: later nodes are known to share memory with that
    for user in later.intersection(written.users):
        user.replace_input_with(written, node)


def _is_put_back(node: Node) -> bool:
    """Whether it is the ``+=`` of ``y[1:] += z``, which Python writes as ``t = y[1:]``, ``t += z``, ``y[1:] = t``."""
    item: Any = node.args[0]
    put: Any = node.next
    is_put = put.target is operator.setitem and item.target is operator.getitem and put.args == (*item.args, node)
    return is_put and node.target in IN_PLACE and [*item.users] == [node] and [*node.users] == [put]


def _write_slice_as_item(node: Node) -> None:
    """``y[:, 0].add_(z)`` is ``y[:, 0] = y[:, 0] + z``: Thunder loses gradients of what is written through a view."""
    written: Any = node.args[0] if node.args else None
    if node.op != "call_method" or not isinstance(written, Node) or written.target is not operator.getitem:
        return
    whole: Any
    index: Any
    whole, index = written.args
    base, result = _value(whole), _value(node)
    if not isinstance(base, torch.Tensor) or not isinstance(result, torch.Tensor) or not result.requires_grad:
        return
    function = _out_of_place(node)
    item: Any = 0.0 if node.target == "zero_" else None
    if node.target in ("copy_", "fill_") and len(node.args) == 2:
        item = node.args[1]
    later = _later(node)
    if not shares_storage(result, base) or _has_other_names(base, later, (whole, written, node)):
        return
    fresh = on_examples(function, example(node.args), example(node.kwargs)) if function is not None else None
    if (fresh is None and item is None) or shares_storage(fresh, base):  # `unsqueeze_` writes nothing
        return
    with node.graph.inserting_before(node):
        if function is not None:
            item = node.graph.create_node(*_called(function), node.args, node.kwargs)
            item.meta["example_value"] = fresh
        node.graph.call_function(operator.setitem, (whole, index, item))
        again = node.graph.call_function(operator.getitem, (whole, index))
        again.meta.update(written.meta)
    node.replace_all_uses_with(again)
    for user in later.intersection(written.users):
        user.replace_input_with(written, again)
    node.graph.erase_node(node)


def _copy_what_is_written(node: Node, options: dict[str, Any]) -> None:
    """``x.sigmoid_()`` is ``x.copy_(x.sigmoid())``, and ``x.fill_(2)`` copies 2 there: Thunder has no such symbols."""
    result = _value(node)
    is_known = node.target in _METHODS or getattr(torch.Tensor, str(node.target), None) in symbols_of_functions()
    if node.op != "call_method" or is_known or not isinstance(result, torch.Tensor) or requires_grad(result):
        return
    fills = node.target == "fill_" and _fits(node.args[-1], result)
    function: Any = torch.full_like if fills else _out_of_place(node)
    fresh = on_examples(function, example(node.args), example(node.kwargs)) if function is not None else None
    if fresh is None or (fresh.dtype, fresh.shape) != (result.dtype, result.shape) or shares_storage(fresh, result):
        return
    with node.graph.inserting_before(node):
        computed = node.graph.create_node(*_called(function), node.args, node.kwargs)
    computed.meta.update(node.meta, example_value=fresh)
    if not is_supported(computed, options):
        node.graph.erase_node(computed)
    else:
        node.target, node.args, node.kwargs = "copy_", (node.args[0], computed), {}


def _fits(number: Any, tensor: torch.Tensor) -> bool:
    """Whether it is a number that a tensor may hold as it is."""
    return isinstance(number, int) or (isinstance(number, float) and tensor.is_floating_point())


def _out_of_place(node: Node) -> Callable[..., Any] | None:
    """The operator that computes what an operator in place writes to its first argument."""
    if node.op == "call_function" and node.target in IN_PLACE:
        return IN_PLACE[node.target]
    if callable(node.target) and node.kwargs.get("inplace") is True:
        return node.target
    if node.op == "call_method" and is_named_in_place(node):
        function = getattr(torch.Tensor, str(node.target)[:-1], None)
        return function if callable(function) else None
    return None


def _called(function: Callable[..., Any]) -> tuple[str, Any]:
    """The kind and the target of a node that calls a function, or a method of tensors."""
    is_method = inspect.ismethoddescriptor(function)
    return ("call_method", function.__name__) if is_method else ("call_function", function)


def _later(node: Node) -> set[Node]:
    """The nodes of the graph that come after this one."""
    nodes = [*node.graph.nodes]
    return {*nodes[nodes.index(node) + 1 :]}


def _has_other_names(tensor: torch.Tensor, later: set[Node], known: tuple[Node, ...]) -> bool:
    """Whether the tensor's memory is not the graph's own, or is read later under a name that is not known."""
    for other in known[0].graph.nodes:
        if shares_storage(_value(other), tensor):
            is_read_later = other not in known and other not in later and not later.isdisjoint(other.users)
            if other.op in ("placeholder", "get_attr") or is_read_later:
                return True
    return False


def _name_as_thunder_does(node: Node) -> None:
    """``x % 5`` is ``torch.remainder(x, 5)``, and ``x.var(-1, unbiased=False)`` is ``x.var(-1, correction=0)``."""
    if node.op == "call_method" and node.target == "broadcast_to":
        node.target = "expand"
    elif node.target is getattr and node.args[1] == "H" and not _value(node).is_complex():
        node.op, node.target, node.args = "call_method", "t", node.args[:1]
    elif operator_name(node) == "nan_to_num" and len(node.args) == 1 and "out" not in node.kwargs:
        node.args = (*node.args, *map(node.kwargs.get, ("nan", "posinf", "neginf")))
        node.kwargs = {}
    elif operator_name(node) == "clone" and node.kwargs.get("memory_format") is torch.contiguous_format:
        if fixed_stride(_value(node.args[0])) is not None and _value(node.args[0]).is_contiguous():
            node.kwargs = {}
    elif node.target is operator.mod and isinstance(_value(node), torch.Tensor):
        node.target = torch.remainder
    elif operator_name(node) in ("std", "std_mean", "var", "var_mean") and not returns_cpu_scalar(node):
        tensor, *others = node.args or [node.kwargs.get("input")]
        given = dict(zip(("unbiased",) if others and isinstance(others[0], bool) else ("dim", "unbiased"), others))
        kwargs = {**given, **{name: value for name, value in node.kwargs.items() if name != "input"}}
        if len(given) == len(others) and isinstance(unbiased := kwargs.pop("unbiased", None), bool):
            node.args, node.kwargs = (tensor,), {**kwargs, "correction": int(unbiased)}


def _pass_by_position(node: Node) -> None:
    """``x.reshape(shape=(4, 2))`` is ``x.reshape((4, 2))``: Thunder's operators do not know the name."""
    if not node.op.startswith("call") or not node.kwargs or is_for_splitter(node.target) or numpy_name(node):
        return
    if not {*_UNKNOWN, *_OF_NUMPY}.intersection(node.kwargs):
        return
    overloads = parameters_of(node.target, operator_name(node))
    known = {name for names in overloads for name in names}
    renamed = {name: new for name, new in _OF_NUMPY.items() if new in known}
    node.kwargs = {renamed.get(name, name): value for name, value in node.kwargs.items()}
    if not (unknown := _UNKNOWN.intersection(node.kwargs)):
        return
    for names in overloads:
        moved = [*takewhile(node.kwargs.__contains__, names[len(node.args) :])]
        if unknown.issubset(moved):
            node.args = (*node.args, *map(node.kwargs.__getitem__, moved))
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in moved}
            return


def _drop_empty_parts(node: Node) -> None:
    """`torch.cat` skips empty vectors whatever the other parts are; Thunder's wants all to have as many dimensions.

    A cache of keys and values begins as such a vector.
    """
    parts = node.args[0] if node.args else None
    if not isinstance(parts, (list, tuple)):
        return
    kept = [part for part in parts if tuple(getattr(_value(part), "shape", ())) != (0,)]
    if not kept or len(kept) == len(parts):
        return
    node.update_arg(0, kept)
    for part in set(parts) - set(kept):
        if isinstance(part, Node) and not part.users and part.target is torch.tensor:
            node.graph.erase_node(part)


def _slice_for_list(node: Node) -> None:
    """``x[..., [-2], :]`` is ``x[..., -2:-1, :].clone()``: PyTorch copies a list to the device in each call."""
    tensor, index = node.args
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    lists = [i for i, part in enumerate(parts) if isinstance(part, list)]
    if len(lists) != 1 or not all(part is None or isinstance(part, (list, slice, type(...))) for part in parts):
        return
    (at,) = lists
    numbers = parts[at]
    if not numbers or len(numbers) > _SLICES or not all(type(number) is int for number in numbers):
        return

    def call(function: Callable[..., Any], *args: Any) -> Node:
        made = node.graph.call_function(function, args)
        made.meta.update(node.meta, example_value=on_examples(function, example(args), {}))
        return made

    with node.graph.inserting_before(node):
        slices = [
            call(operator.getitem, tensor, (*parts[:at], slice(number, number + 1 or None), *parts[at + 1 :]))
            for number in numbers
        ]
        dim = at if ... not in parts[:at] else at - len(parts)
        node.target, node.args = (torch.clone, (slices[0],)) if len(slices) == 1 else (torch.cat, (slices, dim))


def _clamp_slices(node: Node) -> None:
    """Slices that reach beyond a tensor, as those of a sliding window do, end where it ends: Thunder refuses them."""
    tensor, index = node.args
    shape, result = (getattr(_value(each), "shape", None) for each in (tensor, node))
    parts = index if isinstance(index, tuple) else (index,)
    if shape is None or result is None or not all(type(part) in (int, slice, types.NoneType) for part in parts):
        return
    sizes, kept = iter(shape), iter(result)
    clamped = []
    for part in parts:
        size = None if part is None else next(sizes)
        clamped.append(_clamped(part, size, None if isinstance(part, int) else next(kept)))
    node.update_arg(1, (*clamped,))


def _clamped(part: Any, size: Any, kept: Any) -> Any:
    """A part of an index, for a size of which it keeps so much."""
    if not isinstance(part, slice) or part == slice(None):
        return part
    if isinstance(size, torch.SymInt):
        is_whole = isinstance(kept, torch.SymInt) and kept.node.expr == size.node.expr and part.step in (None, 1)
        return slice(None) if is_whole else part
    bounds = (part.start, part.stop, part.step)
    is_constant = all(bound is None or isinstance(bound, int) for bound in bounds)
    return slice(*part.indices(size)) if is_constant else part


def _is_size(node: Node) -> bool:
    return node.op.startswith("call") and isinstance(_value(node), torch.Size)


def _write_out(size: Node) -> None:
    """``x.view(y.size())`` is ``x.view((y.size(0), 4))``: of a size, Thunder's splitter takes only numbers."""
    numbers: Any = size.args[0] if size.target is torch.Size and len(size.args) == 1 else None
    if size.target == "size" and len(size.args) == 1:
        with size.graph.inserting_after(size):
            numbers = [_size_at(size.args[0], i, number) for i, number in enumerate(_value(size))]
    if not isinstance(numbers, (list, tuple)) or any(user.op == "output" for user in size.users):
        return
    for user in [*size.users]:
        if user.target is operator.getitem and isinstance(user.args[1], (int, slice)):
            _replace(user, numbers[user.args[1]])
    _replace(size, (*numbers,))


def _size_at(tensor: Any, i: int, number: int | torch.SymInt) -> Any:
    if isinstance(number, int):
        return number
    node = tensor.graph.call_method("size", (tensor, i))
    node.meta["example_value"] = number
    return node


def _replace(node: Node, value: Any) -> None:
    for user in [*node.users]:
        user.args, user.kwargs = map_aggregate((user.args, user.kwargs), lambda arg: value if arg is node else arg)
    node.graph.erase_node(node)


def _detach_data(graph: Graph) -> None:
    """``x.data`` is ``x.detach()`` where nothing writes to its memory, in the graph or later.

    Not beside 0-dim tensors on the CPU, for which Thunder computes a gradient: see `returns_cpu_scalar`.
    """
    *_, output = graph.nodes
    if any(each.dim() == 0 and each.device.type == "cpu" for each in tensors_in([*map(example, graph.nodes)])):
        return
    returned = [each for each in tensors_in(example(output.args)) if not each.requires_grad]
    kept = [returned, *(example(written_by(node)) for node in graph.nodes)]
    for node in graph.find_nodes(op="call_function", target=GET_DATA):
        if not shares_memory(kept, example(node)):
            with graph.inserting_before(node):
                detached = graph.call_method("detach", node.args)
            detached.meta.update(node.meta)
            node.replace_all_uses_with(detached)
            graph.erase_node(node)


def _make_of_numbers(node: Node) -> None:
    """``torch.as_tensor([2, 3])`` is ``torch.tensor([2, 3])``, which Thunder has, as new memory either way.

    ``torch.tensor([-1])`` is ``torch.full((1,), -1)``, which copies nothing from the host.
    """
    result = _value(node)
    numbers = [(type(leaf), repr(leaf), leaf) for leaf in tree_leaves(node.args)]
    if len(node.args) == 1 and all(isinstance(leaf, (int, float)) for *_, leaf in numbers):
        node.target = torch.tensor
    fits = {int: (torch.int32, torch.int64), float: (torch.float32, torch.float64), bool: (torch.bool,)}
    if not isinstance(result, torch.Tensor) or len({each[:2] for each in numbers}) != 1:
        return
    kind, _, number = numbers[0]
    if result.dtype in fits.get(kind, ()) and not node.kwargs.keys() - {"dtype", "device"}:
        node.target, node.args = torch.full, (tuple(result.shape), number)
        node.kwargs = {"dtype": result.dtype, "device": result.device}


def _write_constants(graph: Graph, transformed: frozenset[str]) -> None:
    """``torch.sqrt(torch.tensor(4.0))`` is ``torch.full((), 2.0)``, and 2.0 where an operator takes a number.

    PyTorch would compute it on the host. Of numbers, PyTorch makes a tensor, and Thunder another number.
    """
    written = [example(written_by(node)) for node in graph.nodes]
    for node in [*graph.nodes]:
        constant = known_constant(node)
        if constant is None or constant.dim() or node.name in transformed or shares_memory(written, _value(node)):
            continue
        number = constant.item()
        for user in [each for each in node.users if _takes_number(each, node, number)]:
            values = {**{arg: arg for arg in user.all_input_nodes}, node: number}
            user.args, user.kwargs = (map_arg(each, values.__getitem__) for each in (user.args, user.kwargs))
        node.op, node.target, node.args = "call_function", torch.full, ((), number)
        node.kwargs = {"dtype": constant.dtype, "device": constant.device}
        if not node.users:
            graph.erase_node(node)


def _takes_number(user: Node, constant: Node, number: Any) -> bool:
    """Whether an operator computes the same with a number in the place of a 0-dim tensor."""
    if user.op == "call_method" and user.target in _TAKE_SIZES:
        return user.args[0] is not constant
    if operator_name(user) in ("clamp", "clip"):
        return any(isinstance(bound, (int, float)) for bound in (*user.args[1:], *user.kwargs.values()))
    if user.target not in _ARITHMETIC or user.kwargs:
        return False
    args = [number if arg is constant else example(arg) for arg in user.args]
    is_beside_larger = any(isinstance(arg, torch.Tensor) and arg.dim() for arg in args)
    return is_beside_larger and on_examples(user.target, args, {}).dtype == _value(user).dtype


def _name_vector_norm(node: Node) -> None:
    """``x.norm(dim=-1)`` is ``torch.linalg.vector_norm(x, 2, dim=-1)``: Thunder has other gradients of the former."""
    signature = inspect.signature(torch.Tensor.norm if node.target == "norm" else torch.norm)
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    tensor, p, dim, keepdim, *others = bound.arguments.values()
    if p != "nuc" and all(other is None for other in others) and not (isinstance(dim, (list, tuple)) and len(dim) > 2):
        node.op, node.target = "call_function", torch.linalg.vector_norm
        node.args = tensor, 2 if p in ("fro", None) else p
        node.kwargs = {"dim": dim, "keepdim": keepdim}


def _pass_each_operand(node: Node) -> None:
    """``einsum("ij,jk->ik", (x, y))`` is ``einsum("ij,jk->ik", x, y)``."""
    equation, *operands = node.args
    if isinstance(equation, str) and len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        node.args = (equation, *operands[0])


def _draw_out_of_place(node: Node) -> None:
    """``x.new_empty(...).bernoulli_(p)``, as stochastic depth has it, draws into a tensor that nothing else sees."""
    tensor, *numbers = node.args
    if not isinstance(tensor, Node) or [*tensor.users] != [node] or node.kwargs:
        return
    if tensor.target in _MAKE_NEW and all(isinstance(number, (int, float)) for number in numbers):
        node.op, node.target = "call_function", operators.drawn(str(node.target))


def _unfold_to_new_memory(node: Node) -> None:
    """Thunder takes the method for the function of that name."""
    if not shares_memory([example(written_by(each)) for each in node.graph.nodes], _value(node)):
        node.op, node.target = "call_function", operators.unfold()


def _reshape_what_thunder_lays_out(node: Node) -> None:
    """What `torch.einsum` returns, which Thunder writes out, may have no such view there."""
    source: Any = node.args[0]
    is_product = isinstance(source, Node) and source.target is torch.einsum
    if is_product and not any(isinstance(arg, torch.dtype) for arg in node.args) and not layout_counts(node):
        node.target = "reshape"


def _scatter_without_waiting(node: Node) -> None:
    """Models of images and text place an image's values so. PyTorch's backward would read the mask on the host."""
    named = dict(zip(("input", "mask", "source"), node.args), **node.kwargs)
    is_whole = named.keys() == {"input", "mask", "source"} and _value(named["input"]).shape == _value(node).shape
    if is_whole and requires_grad(_value(node)):
        node.op, node.target, node.kwargs = "call_function", operators.masked_scatter(), {}
        node.args = named["input"], named["mask"], named["source"]


def _name_condition_first(node: Node) -> None:
    """``x.where(condition, y)`` is ``torch.where(condition, x, y)``: Thunder takes the first for the condition."""
    named = dict(zip(("input", "condition", "other"), node.args), **node.kwargs)
    if named.keys() == {"input", "condition", "other"}:
        node.op, node.target, node.kwargs = "call_function", torch.where, {}
        node.args = named["condition"], named["input"], named["other"]


_METHODS: dict[Any, Callable[[Node], None]] = {
    **dict.fromkeys(("bernoulli_", "exponential_", "normal_", "uniform_"), _draw_out_of_place),
    "masked_scatter": _scatter_without_waiting,
    "unfold": _unfold_to_new_memory,
    "view": _reshape_what_thunder_lays_out,
    "where": _name_condition_first,
}


def _count_padding_from_start(node: Node) -> None:
    """Thunder does not count a negative ``padding_idx`` from the end, so that row would get a gradient."""
    given = inspect.signature(F.embedding).bind(*node.args, **node.kwargs).arguments
    padding, rows = given.get("padding_idx"), _value(given["weight"]).shape[0]
    if isinstance(padding, int) and padding < 0:
        node.args = given.pop("input"), given.pop("weight")
        node.kwargs = {**given, "padding_idx": padding + rows}


def _calls_of_autograd_functions(graph: Graph) -> list[list[Node]]:
    """The calls of each ``torch.autograd.Function``, as releases of PyTorch from 2.10 on write them."""
    found: defaultdict[Any, list[Node]] = defaultdict(list)
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        if "args_tensor_mask" not in call.kwargs:
            found[tuple(getattr(arg, "target", arg) for arg in call.args[:2])].append(call)
    return [*found.values()]


def _give_autograd_functions_what_they_use(module: GraphModule) -> None:
    for calls in _calls_of_autograd_functions(module.graph):
        forward, backward = (
            module.get_submodule(str(arg.target)) for arg in calls[0].args[:2] if isinstance(arg, Node)
        )
        if isinstance(forward, GraphModule) and isinstance(backward, GraphModule):
            _return_what_is_used(calls, forward, backward)
            _take_no_sizes(calls, forward, backward)
            forward.recompile()
            backward.recompile()


def _return_what_is_used(calls: Sequence[Node], forward: GraphModule, backward: GraphModule) -> None:
    """The forward of a ``torch.autograd.Function`` returns what later nodes or its backward use, and nothing else.

    Dynamo (2.11) has it return all that it computes. What it writes in place would be two results, and autograd would
    give the gradient to the second one, and zeros to the user's backward.

    Args:
        calls: all that have these graphs.
    """
    items = {item for call in calls for item in call.users}
    (output,) = forward.graph.find_nodes(op="output")
    results, *saved = output.args[0]
    if not isinstance(results, (list, tuple)) or any(item.target is not operator.getitem for item in items):
        return
    gradients = backward.graph.find_nodes(op="placeholder")[: len(results)]
    for item in [item for item in items if not item.users]:
        items.remove(item)
        item.graph.erase_node(item)
    used: dict[Node, Any] = {item: item.args[1] for item in items}
    kept = [i for i, gradient in enumerate(gradients) if gradient.users or i in used.values()]
    if not kept or len(gradients) < len(results):
        return
    output.args = ((tuple(results[i] for i in kept), *saved),)
    for i in {*range(len(results))}.difference(kept):
        backward.graph.erase_node(gradients[i])
    for item, i in used.items():
        item.args = (item.args[0], kept.index(i))
    for call in calls:
        call.meta["example_value"] = tuple(_value(call)[i] for i in kept)
        without: Any = call.kwargs.get("non_differentiable_idx", ())
        call.kwargs = {**call.kwargs, "non_differentiable_idx": [kept.index(i) for i in without if i in kept]}


def _take_no_sizes(calls: Sequence[Node], forward: GraphModule, backward: GraphModule) -> None:
    """The graphs of a ``torch.autograd.Function`` take no sizes, which Dynamo passes, but read them from tensors."""
    output: Any
    gradients: Any
    (output,), (gradients,) = (each.graph.find_nodes(op="output") for each in (forward, backward))
    results, saved = output.args[0]
    if not isinstance(results, (list, tuple)):
        return
    taken, given = (each.graph.find_nodes(op="placeholder") for each in (forward, backward))
    values = dict(zip(given, map(_value, (*results, *saved)))) | {node: _value(node) for node in taken}
    sizes = [node for node, value in values.items() if isinstance(value, torch.SymInt)]
    shown: dict[Node, Any] = {
        size: _dimension_of(values[size], taken if size in taken else given, values) for size in sizes
    }
    of_sizes = [gradients.args[0][taken.index(size)] for size in sizes if size in taken]
    if not sizes or None in shown.values() or any(each is not None for each in of_sizes):
        return
    kept = [i for i, value in enumerate(saved) if not isinstance(_value(value), torch.SymInt)]
    tensors = [i for i, node in enumerate(taken) if node not in sizes]
    output.args = ((results, tuple(saved[i] for i in kept)),)
    gradients.args = (tuple(gradients.args[0][i] for i in tensors),)
    for size, (tensor, dim) in shown.items():
        if size.users:
            with size.graph.inserting_after([*size.graph.find_nodes(op="placeholder")][-1]):
                size.replace_all_uses_with(_size_at(tensor, dim, values[size]))
        size.graph.erase_node(size)
    for call in calls:
        call.args = (*call.args[:2], *(call.args[2 + i] for i in tensors))
        tracked: Any = call.kwargs["saved_for_backward_idx"]
        indices = [kept.index(i) for i in tracked if i in kept]
        call.kwargs = {**call.kwargs, "saved_for_backward_idx": indices}


def _dimension_of(size: torch.SymInt, nodes: Sequence[Node], values: dict[Node, Any]) -> tuple[Node, int] | None:
    """A tensor among the nodes, and which of its dimensions has the size."""
    for node in reversed(nodes):
        for dim, other in enumerate(getattr(values[node], "shape", ())):
            if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                return node, dim
    return None


def _write_as_before(call: Node, module: GraphModule, options: dict[str, Any]) -> None:
    """A ``torch.autograd.Function`` as releases of PyTorch before 2.10 wrote it, which Thunder 0.2 can trace.

    Its graphs, forward and backward, took an object of Python first, and the call said which arguments are tensors.
    """
    is_new = "args_tensor_mask" not in call.kwargs and not call.kwargs.get("non_differentiable_idx")
    takes_tensors = all(isinstance(_value(arg), torch.Tensor) for arg in call.args[2:])
    casts = any_autocast_enabled() or any("autocast" in getattr(n.target, "__name__", "") for n in module.graph.nodes)
    if casts or not (is_new and takes_tensors):
        return
    bodies = [module.get_submodule(str(arg.target)) for arg in call.args[:2] if isinstance(arg, Node)]
    graphs = [body for body in bodies if isinstance(body, GraphModule)]
    for node in [node for graph in graphs for node in graph.graph.nodes]:
        if operator_name(node) == "clip":  # Thunder has the symbol, with another gradient, which is not asked for here
            node.target = "clamp" if node.op == "call_method" else torch.clamp
        elif _is_size(node):
            _write_out(node)
            continue
        _compute_out_of_place(node, has_gradient=True)
    writes = any(written_by(node) for graph in graphs for node in graph.graph.nodes)
    if writes or len(graphs) < 2 or not all(can_trace_all(graph, options) for graph in graphs):
        return
    for graph in graphs:
        first = next(iter(graph.graph.nodes))
        if first.name != "ctx":  # else another call has the same graph
            with graph.graph.inserting_before(first):
                graph.graph.placeholder("ctx")
            graph.recompile()
    call.kwargs = {**call.kwargs, "args_tensor_mask": [True] * (len(call.args) - 2)}
    if len(_value(call)) == 1:  # Thunder returns a single result without a tuple, so its item 0 would be its first row
        _return_first_alone(call)


def _use_own_operator(node: Node, options: dict[str, Any]) -> None:
    if node.target is F.multi_head_attention_forward:
        _trace_multi_head_attention(node)
        return
    if node.target is F.scaled_dot_product_attention:
        if not _is_more_than_symbol(node):
            return
        if (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) != 0.0:
            node.target = operators.attention  # the backward of PyTorch's operator would draw again
            return
        if len(node.args) == 3 and "attn_mask" in node.kwargs:  # Thunder takes no keyword that may have a gradient
            others = {name: value for name, value in node.kwargs.items() if name != "attn_mask"}
            node.args, node.kwargs = (*node.args, node.kwargs["attn_mask"]), others
    if node.target in (F.cross_entropy, F.nll_loss) and _is_right_loss(node):
        return
    if any(map(requires_grad, tree_leaves([arg for arg in example(node.args) if isinstance(arg, (list, tuple))]))):
        _pass_each_of_list(node, options)
        return
    function: Any = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if operator_name(node) in ("mul", "multiply"):
        if not (requires_grad(_value(node)) and has_another_derivative(node)):
            return
        function = torch.mul
    if operator_name(node) == "repeat_interleave":
        repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        if not isinstance(repeats, int):  # read on the host if it is a tensor
            return
    is_partial = operators.is_partial(function)
    if is_partial and is_supported(node, options):
        return
    if (is_partial or library_name(function)) and returns_cpu_scalar(node):
        return
    own = operators.instead_of(function)
    if own is not None and not depends_on_autocast(node, function) and can_trace(own, node, options):
        node.op, node.target = "call_function", own


def _pass_each_of_list(node: Node, options: dict[str, Any]) -> None:
    """``torch.hstack([x, y])`` takes ``x`` and ``y`` by themselves: Thunder's fallback for it loses their gradients."""
    function: Any = node.target
    args, own = node.args, operators.of_list(function) if node.op == "call_function" else None
    if own is None or node.kwargs or depends_on_autocast(node, function):
        return
    node.target, node.args = own, (*tree_leaves(args),)
    if not can_trace(own, node, options):
        node.target, node.args = function, args


def _wait_in_trace(collective: Node, options: dict[str, Any]) -> None:
    """Thunder traces the collective and its wait in one, and `analysis/collectives.py` takes them apart."""
    own = operators.collective(collective.target)
    tensor, *others = collective.args
    if own is None or is_unused(collective) or collective.kwargs or collective.all_input_nodes != [tensor]:
        return
    if can_trace(lambda x, *numbers: own(x, *others), collective, options):  # the splitter has proxies for numbers
        collective.target = own
        while wait := next(filter(is_wait, collective.users), None):
            wait.replace_all_uses_with(collective)
            collective.graph.erase_node(wait)


def _leave_out_of_backward(graph: Graph, transformed: frozenset[str], options: dict[str, Any]) -> None:
    """Of what has no gradient, Thunder differentiates what it can, such as ``x * 2``, and raises for the rest.

    The rest, such as ``x.round()`` of a float without one, and ``x.isfinite()`` of any, is computed under
    ``torch.no_grad``, of which it knows.
    """
    nodes = [*graph.nodes]
    if not any(requires_grad(example(node)) for node in nodes):
        return
    untracked = transformed | without_gradient(graph)
    for node in nodes:
        inputs = example(node.all_input_nodes)
        is_call = node.op in ("call_function", "call_method") and node.name not in untracked
        has_gradient = any(map(requires_grad, tree_leaves(_value(node))))
        if not is_call or has_gradient or not any(tensor.is_floating_point() for tensor in tensors_in(inputs)):
            continue
        is_fresh = _NEW in node.meta or not (written_by(node) or shares_memory(inputs, _value(node)))
        if is_fresh and is_supported(node, options, with_gradient=False) and not is_differentiable(node, options):
            compute_without_gradient(node)


def _is_right_loss(node: Node) -> bool:
    """Whether Thunder's loss of classes is: its mean of smoothed losses counts what is ignored, and some of its
    gradients raise. Its `nll_loss` takes fewer arguments, and has no right default of ``ignore_index``."""
    is_whole = node.target is F.cross_entropy or (len(node.args) <= 3 and "ignore_index" in node.kwargs)
    is_sum = node.kwargs.get("reduction", "mean") == "sum"
    return is_whole and not is_sum and not node.kwargs.get("label_smoothing") and _value(node.args[0]).dim() in (2, 4)


def _is_more_than_symbol(attention: Node) -> bool:
    """Whether Thunder's symbol for attention, whose kernels are better in training, gets it wrong.

    It takes no ``enable_gqa``. On the CPU, it is written out, and NaN for what a mask keeps from attending to anything,
    as the padding on the left.
    """
    mask = attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")
    is_masked_on_cpu = mask is not None and _value(attention).device.type == "cpu"
    return bool(attention.kwargs.get("enable_gqa")) or is_masked_on_cpu


def _trace_multi_head_attention(node: Node) -> None:
    """Thunder traces the function. Without the weights, it returns the output alone: the splitter wants no None."""
    values = _value(node)
    if not isinstance(values, tuple) or values[1] is not None:
        node.target = operators.multi_head_attention()
        return
    node.target = operators.multi_head_attention(output_only=True)
    _return_first_alone(node)


def _return_first_alone(node: Node) -> None:
    """What is called returns the first of its results, and no tuple; the others are not used."""
    node.meta["example_value"] = _value(node)[0]
    for item in [*node.users]:
        if item.args[1] == 0:
            item.replace_all_uses_with(node)
        item.graph.erase_node(item)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None
