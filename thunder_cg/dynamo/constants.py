"""Numbers, sizes and indices that are known when Dynamo has made a graph, written as Thunder takes them."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from thunder_cg.compat.fx import (
    example,
    fixed_float,
    is_of_array,
    known_constant,
    numpy_name,
    operator_name,
    read_number,
    symbols_in,
    symbols_of_sizes,
)
from thunder_cg.compat.splitter import for_splitter
from thunder_cg.compat.tensors import tree_leaves
from thunder_cg.dynamo.nodes import call_before, call_instead, drop_unused, is_number, replace, result_of
from thunder_cg.dynamo.writes import DRAWS, shares_memory, written_by

_SLICES = 8  # up to as many, a list of numbers is written as slices
_ARITHMETIC = frozenset([torch.add, torch.div, torch.floor_divide, torch.mul, torch.remainder, torch.sub])
_ARITHMETIC |= {operator.add, operator.floordiv, operator.mul, operator.sub, operator.truediv}
_TAKE_SIZES = frozenset(["as_strided", "expand", "new_empty", "new_ones", "new_zeros", "repeat", "reshape", "view"])


LEGACY = (torch.BoolTensor, torch.DoubleTensor, torch.FloatTensor, torch.IntTensor, torch.LongTensor)


def _truncated(number: Any) -> Any:
    return math.floor(number) if number >= 0 else math.ceil(number)


OF_NUMBERS: dict[Any, Callable[..., Any]] = {
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_sum: for_splitter(sum, "sum"),
    torch.sym_int: for_splitter(_truncated, "int"),
    torch.sym_float: for_splitter(lambda number: number / 1, "float"),
}


def name_function_of_numbers(node: Node) -> None:
    """``torch.sym_max`` of numbers is `max`."""
    if isinstance(example(node), (int, float, torch.SymInt, torch.SymFloat)):
        node.target = OF_NUMBERS[node.target]


def write_floats(graph: Graph) -> None:
    """Dynamo reads a float that changes from call to call from a tensor, also where it compiles for each value."""
    for node in graph.find_nodes(op="call_method", target="item"):
        if (number := fixed_float(node)) is not None:
            replace(node, number)


def read_sizes_first(graph: Graph) -> None:
    """Reads a number before a tensor has the size that it is, as PyTorch's split of a graph wants it.

    Dynamo passes a number of NumPy's as a tensor: ``x.new_zeros(n)`` takes it as it is, and ``x[:n]`` reads it. So does
    ``F.pad(x, (n, 0))`` take a tensor of the user's.
    """
    placeholders = graph.find_nodes(op="placeholder")
    read = dict[Any, Node]()
    for node in [*graph.nodes]:
        inputs = node.all_input_nodes
        if numpy_name(node) == "numpy.item" and isinstance(example(node), torch.SymInt) and node.args:
            read[node.args[0]] = node
            _after(node.args[0], placeholders).append(node)
        elif new := symbols_of_sizes(node) - symbols_of_sizes(*inputs):
            for number in (each for each in inputs if symbols_in(each) & new):
                if number not in read:
                    with graph.inserting_after(_after(number, placeholders)):
                        read[number] = read_number(number, node)
                if node.op == "call_function" or node.args[0] is not number:
                    node.replace_input_with(number, read[number])


def compute_numbers_first(graph: Graph) -> None:
    """Computes a number as soon as the sizes that it is made of are known, so that it cuts nothing in two."""
    last = [*graph.nodes]  # at each place, where numbers that are made there come one after the other
    place = {node: i for i, node in enumerate(last)}
    written = {each for node in graph.nodes for each in written_by(node)}
    for node in [node for node in graph.nodes if node.op.startswith("call") and is_number(node)]:
        inputs = node.all_input_nodes
        if inputs and written.isdisjoint(inputs) and (node.target == "size" or all(map(is_number, inputs))):
            place[node] = at = max(place[each] for each in inputs)
            last[at].append(node)
            last[at] = node


def _after(node: Node, placeholders: Sequence[Node]) -> Node:
    return placeholders[-1] if node in placeholders else node


def is_size(node: Node) -> bool:
    """Whether it has all sizes of a tensor, or all its strides."""
    is_stride = node.target == "stride" and isinstance(example(node), tuple)
    return node.op.startswith("call") and (is_stride or isinstance(example(node), torch.Size))


def write_out(size: Node) -> None:
    """``x.view(y.size())`` is ``x.view((y.size(0), 4))``: of a size, Thunder's splitter takes only numbers."""
    numbers: Any = size.args[0] if size.target is torch.Size and len(size.args) == 1 else None
    if size.target in ("size", "stride") and len(size.args) == 1:
        method = str(size.target)
        with size.graph.inserting_after(size):
            numbers = [size_at(size.args[0], i, number, method) for i, number in enumerate(example(size))]
        for number in (each for each in numbers if isinstance(each, Node)):
            number.meta = {**size.meta, **number.meta}
    if isinstance(numbers, (list, tuple)):
        _write_numbers(size, numbers)


def _write_numbers(size: Node, numbers: Sequence[Any]) -> None:
    """Puts these in the place of sizes, unless the graph returns them."""
    if any(user.op == "output" for user in size.users):
        return
    for user in [*size.users]:
        if user.target is operator.getitem and isinstance(user.args[1], (int, slice)):
            replace(user, numbers[user.args[1]])
    replace(size, (*numbers,))


def write_broadcast_sizes(node: Node) -> None:
    """``torch.broadcast_shapes(x.shape, y.shape)`` has at each place a size of one of them, and Dynamo knows of which.

    Without a user, it checks what Dynamo has checked.
    """
    sizes, numbers = example(node) or (), list[Any]()
    for i in range(1, len(sizes) + 1):
        shapes = (shape for shape in node.args if isinstance(shape, (list, tuple)) and len(shape) >= i)
        # As text: to compare sizes would make guards.
        numbers[:0] = [n for shape in shapes if str(example(n := shape[-i])) == str(sizes[-i])][:1]
    if sizes and len(numbers) == len(sizes):
        _write_numbers(node, numbers)
    else:
        drop_unused(node)


def size_at(tensor: Any, i: int, number: int | torch.SymInt, method: str = "size") -> Any:
    if isinstance(number, int):
        return number
    node = tensor.graph.call_method(method, (tensor, i))
    node.meta["example_value"] = number
    return node


def make_tensor(node: Node) -> None:
    """``torch.as_tensor(x)`` is ``x.to(x.device, x.dtype)`` for a tensor, which Thunder has."""
    source, result = node.args[0] if node.args else None, example(node)
    if not isinstance(example(source), torch.Tensor):
        _make_of_numbers(node)
    elif node.target is torch.as_tensor and not is_of_array(node):
        call_instead(node, torch.Tensor.to, source, result.device, result.dtype)


def store_at_tensors(node: Node) -> None:
    """``y[[0, 2]] = z`` is ``y[torch.tensor([0, 2])] = z``, of which nothing is copied from the host then."""
    if node.target is not operator.setitem:
        return
    tensor, index = example(node.args[0]), node.args[1]

    def made(part: Any) -> Any:
        if not isinstance(part, list) or not part or not all(type(number) is int for number in part):
            return part
        result = tensor.new_empty(len(part), dtype=torch.int64)
        numbers = call_before(node, torch.tensor, (part,), {"device": tensor.device}, result=result)
        _make_of_numbers(numbers)
        return numbers

    node.update_arg(1, tuple(map(made, index)) if isinstance(index, tuple) else made(index))


def name_legacy_constructor(node: Node) -> None:
    """``torch.IntTensor([2])`` is ``torch.tensor([2], dtype=torch.int32)``."""
    numbers, result = node.args[0] if len(node.args) == 1 else None, example(node)
    if isinstance(numbers, list) and not node.all_input_nodes and not node.kwargs:
        call_instead(node, torch.tensor, numbers, dtype=result.dtype, device=result.device)
        _make_of_numbers(node)


def _make_of_numbers(node: Node) -> None:
    """``torch.as_tensor([2, 3])`` is ``torch.tensor([2, 3])``, which Thunder has, as new memory either way.

    ``torch.tensor([-1])`` is ``torch.full((1,), -1)``, which copies nothing from the host. So are a few numbers that
    differ, as the mean of each color of an image or the sizes of one, one by one.
    """
    result = example(node)
    numbers = [(type(example(leaf)), repr(leaf), leaf) for leaf in tree_leaves(node.args)]
    if len(node.args) == 1 and all(isinstance(leaf, (int, float)) for *_, leaf in numbers):
        node.target = torch.tensor
    integers, floats = (torch.int32, torch.int64), (torch.float32, torch.float64)
    fits = {int: integers, float: floats, bool: (torch.bool,), torch.SymInt: (*integers, *floats)}
    kinds, texts = {kind for kind, *_ in numbers}, {text for _, text, _ in numbers}
    kinds = kinds - {torch.SymInt} or kinds
    if not isinstance(result, torch.Tensor) or len(kinds) != 1 or node.kwargs.keys() - {"dtype", "device"}:
        return
    options: dict[str, Any] = {"dtype": result.dtype, "device": result.device}
    if result.dtype not in fits.get(kinds.pop(), ()):
        return
    if len(texts) == 1:
        call_instead(node, torch.full, tuple(result.shape), numbers[0][2], **options)
    elif len(numbers) <= _SLICES:
        one, all_ = result.new_empty(1), result.new_empty(len(numbers))
        parts = [call_before(node, torch.full, ((1,), number), options, result=one) for *_, number in numbers]
        call_instead(node, torch.reshape, call_before(node, torch.cat, (parts,), result=all_), tuple(result.shape))


def write_constants(graph: Graph, transformed: frozenset[str]) -> None:
    """``torch.sqrt(torch.tensor(4.0))`` is ``torch.full((), 2.0)``, and 2.0 where an operator takes a number.

    PyTorch would compute it on the host. Of numbers, PyTorch makes a tensor, and Thunder another number.
    """
    written = [example(written_by(node)) for node in graph.nodes]
    for node in [*graph.nodes]:
        constant = known_constant(node)
        if constant is None or constant.dim() or node.name in transformed or shares_memory(written, example(node)):
            continue
        number = constant.item()
        for user in [each for each in node.users if _takes_number(each, node, number)]:
            values = {**{arg: arg for arg in user.all_input_nodes}, node: number}
            user.args, user.kwargs = (map_arg(each, values.__getitem__) for each in (user.args, user.kwargs))
        call_instead(node, torch.full, (), number, dtype=constant.dtype, device=constant.device)
        drop_unused(node)


def _takes_number(user: Node, constant: Node, number: Any) -> bool:
    """Whether an operator computes the same with a number in the place of a 0-dim tensor."""
    if user.op == "call_method" and user.target in _TAKE_SIZES | DRAWS:
        return user.args[0] is not constant
    if operator_name(user) in ("clamp", "clip"):
        return any(isinstance(bound, (int, float)) for bound in (*user.args[1:], *user.kwargs.values()))
    if user.target not in _ARITHMETIC or user.kwargs:
        return False
    args = [number if arg is constant else example(arg) for arg in user.args]
    is_beside_larger = any(isinstance(arg, torch.Tensor) and arg.dim() for arg in args)
    return is_beside_larger and result_of(user.target, args).dtype == example(user).dtype


def write_index(node: Node) -> None:
    """An index as Thunder takes it, and without a copy to the device."""
    _clamp_slices(node)
    _slice_for_list(node)


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

    slices = []
    for number in numbers:
        args = tensor, (*parts[:at], slice(number, number + 1 or None), *parts[at + 1 :])
        slices.append(call_before(node, operator.getitem, args, result=result_of(operator.getitem, args)))
    dim = at if ... not in parts[:at] else at - len(parts)
    node.target, node.args = (torch.clone, (slices[0],)) if len(slices) == 1 else (torch.cat, (slices, dim))


def _clamp_slices(node: Node) -> None:
    """Slices that reach beyond a tensor, as those of a sliding window do, end where it ends: Thunder refuses them."""
    tensor, index = node.args
    shape, result = (getattr(example(each), "shape", None) for each in (tensor, node))
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
