"""Calls of PyTorch's operators, by the names and with the arguments that Thunder's take."""

from __future__ import annotations

import inspect
import operator
import types
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from thunder_cg.compat.fx import (
    AUTOCAST_DTYPES,
    compute_with_grad_mode,
    dtype_of_casts,
    example,
    numpy_name,
    operator_name,
)
from thunder_cg.compat.operators import parameters_of
from thunder_cg.compat.splitter import fallback_of, is_for_splitter
from thunder_cg.compat.tensors import is_inexact
from thunder_cg.dynamo import operators
from thunder_cg.dynamo.fallbacks import has_another_derivative, returns_cpu_scalar
from thunder_cg.dynamo.layouts import fixed_stride, layout_counts
from thunder_cg.dynamo.nodes import arguments, call_before, call_instead, result_of
from thunder_cg.dynamo.writes import is_returned_beside_another, requires_grad, shares_memory, written_by

# Names of arguments that Thunder's operators do not have: PyTorch's own, and those of NumPy, which PyTorch takes, too.
_UNKNOWN = frozenset({
    "condition", "dims", "input", "repeats", "shape", "size", "split_size", "split_size_or_sections", "tensor",
    "tensors", "weight",
})  # fmt: skip
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_DEFAULTS = {"layout": torch.strided, "pin_memory": False, "requires_grad": False}  # which Thunder has no names for


def cast_as_autocast_does(node: Node) -> None:
    """Under autocast, ``F.cross_entropy(x, y)`` is ``F.cross_entropy(x.float(), y)``: Thunder's is for layers alone."""
    dtype = dtype_of_casts(node) if node.op.startswith("call") else None
    for arg in node.all_input_nodes if dtype is not None else ():
        if getattr(example(arg), "dtype", dtype) in AUTOCAST_DTYPES - {dtype}:
            cast = result_of(torch.Tensor.to, (arg, dtype))
            node.replace_input_with(arg, call_before(node, torch.Tensor.to, (arg, dtype), result=cast))


def name_as_thunder_does(node: Node) -> None:
    """``x % 5`` is ``torch.remainder(x, 5)``, and ``x.var(-1, unbiased=False)`` is ``x.var(-1, correction=0)``."""
    is_torchs = node.op == "call_method" or getattr(torch, operator_name(node), None) is node.target
    if is_torchs and any(node.kwargs.get(name) is default for name, default in _DEFAULTS.items()):
        node.kwargs = {name: value for name, value in node.kwargs.items() if _DEFAULTS.get(name, ...) is not value}
    if node.op == "call_method" and node.target == "broadcast_to":
        node.target = "expand"
    elif node.target == "float" and not node.kwargs and example(node) is example(node.args[0]):
        node.target, node.args = "to", (node.args[0], torch.float32)  # which may be returned beside its argument
    elif node.target == "to" and len(node.args) == 4 and node.args[3] is False:  # a module's, with non_blocking
        node.args = node.args[: 2 if node.args[2] is None else 3]
    elif node.target is getattr and node.args[1] in ("H", "mH") and not example(node).is_complex():
        node.args = (node.args[0], str(node.args[1]).replace("H", "T"))
    elif node.target is getattr and node.args[1] in ("imag", "real"):
        call_instead(node, getattr(torch, str(node.args[1])), node.args[0])
    elif node.target is torch.arange and not node.args and "end" in node.kwargs:
        node.kwargs = {"start": 0, **node.kwargs}
    elif operator_name(node) == "nan_to_num" and len(node.args) == 1 and "out" not in node.kwargs:
        node.args = (*node.args, *map(node.kwargs.get, ("nan", "posinf", "neginf")))
        node.kwargs = {}
    elif operator_name(node) == "clone" and node.kwargs.get("memory_format") is torch.contiguous_format:
        if fixed_stride(example(node.args[0])) is not None and example(node.args[0]).is_contiguous():
            node.kwargs = {}
    elif node.target is operator.mod and isinstance(example(node), torch.Tensor):
        node.target = torch.remainder
    elif operator_name(node) in ("std", "std_mean", "var", "var_mean") and not returns_cpu_scalar(node):
        tensor, *others = node.args or [node.kwargs.get("input")]
        given = dict(zip(("unbiased",) if others and isinstance(others[0], bool) else ("dim", "unbiased"), others))
        kwargs = {**given, **{name: value for name, value in node.kwargs.items() if name != "input"}}
        if len(given) == len(others) and isinstance(unbiased := kwargs.pop("unbiased", None), bool):
            node.args, node.kwargs = (tensor,), {**kwargs, "correction": int(unbiased)}


def pass_by_position(node: Node) -> None:
    """``x.reshape(shape=(4, 2))`` is ``x.reshape((4, 2))``: Thunder's operators do not know the name.

    Nor do its fallbacks take a tensor of floats by name where another one has a gradient.
    """
    if not node.op.startswith("call") or not node.kwargs or is_for_splitter(node.target) or numpy_name(node):
        return
    is_fallback = fallback_of(node) is not None
    tracked = {name for name, value in node.kwargs.items() if is_fallback and is_inexact(example(value))}
    if not {*_UNKNOWN, *_OF_NUMPY, *tracked}.intersection(node.kwargs):
        return
    overloads = parameters_of(node.target, operator_name(node))
    known = {name for names in overloads for name in names}
    renamed = {name: new for name, new in _OF_NUMPY.items() if new in known}
    node.kwargs = {renamed.get(name, name): value for name, value in node.kwargs.items()}
    if not (unknown := (_UNKNOWN | tracked).intersection(node.kwargs)):
        return
    if is_fallback and isinstance(node.target, types.FunctionType):  # as torch.stft, with what is between by default
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        node.args, node.kwargs = bound.args, bound.kwargs
        return
    for names in overloads:
        moved = [*takewhile(node.kwargs.__contains__, names[len(node.args) :])]
        if unknown.issubset(moved):
            node.args = (*node.args, *map(node.kwargs.__getitem__, moved))
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in moved}
            return


def drop_empty_parts(node: Node) -> None:
    """`torch.cat` skips empty vectors whatever the other parts are; Thunder's wants all to have as many dimensions.

    A cache of keys and values begins as such a vector.
    """
    parts = node.args[0] if node.args else None
    if not isinstance(parts, (list, tuple)):
        return
    kept = [part for part in parts if tuple(getattr(example(part), "shape", ())) != (0,)]
    if not kept or len(kept) == len(parts):
        return
    node.update_arg(0, kept)
    for part in set(parts) - set(kept):
        if isinstance(part, Node) and not part.users and part.target is torch.tensor:
            node.graph.erase_node(part)


def name_vector_norm(node: Node) -> None:
    """``x.norm(dim=-1)`` is ``torch.linalg.vector_norm(x, 2, dim=-1)``: Thunder has other gradients of the former."""
    signature = inspect.signature(torch.Tensor.norm if node.target == "norm" else torch.norm)
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    tensor, p, dim, keepdim, *others = bound.arguments.values()
    if p != "nuc" and all(other is None for other in others) and not (isinstance(dim, (list, tuple)) and len(dim) > 2):
        order = 2 if p in ("fro", None) else p
        call_instead(node, torch.linalg.vector_norm, tensor, order, dim=dim, keepdim=keepdim)


def pass_each_operand(node: Node) -> None:
    """``einsum("ij,jk->ik", (x, y))`` is ``einsum("ij,jk->ik", x, y)``."""
    equation, *operands = node.args
    if isinstance(equation, str) and len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        node.args = (equation, *operands[0])


def multiply_one_by_one(node: Node) -> None:
    """``math.prod((x, y))`` is ``1 * x * y``: Thunder's symbol of that name takes numbers alone."""
    factors, product = node.args[0], node.kwargs.get("start", 1)
    if isinstance(factors, (list, tuple)) and isinstance(example(node), torch.Tensor):
        for factor in factors[:-1]:
            args = (product, factor)
            product = call_before(node, operator.mul, args, result=result_of(operator.mul, args))
        call_instead(node, operator.mul, product, factors[-1])


def embed_with_padding(node: Node) -> None:
    """Thunder does not count a negative ``padding_idx`` from the end, so that row would get a gradient. It takes no
    int32 beside one.
    """
    given = arguments(node, *inspect.signature(F.embedding).parameters)
    padding, weight, indices = given.get("padding_idx"), given.pop("weight"), given.pop("input")
    if not isinstance(padding, int):
        return
    if example(indices).dtype is torch.int32:
        long = result_of(torch.Tensor.to, (indices, torch.int64))
        indices = call_before(node, torch.Tensor.to, (indices, torch.int64), result=long)
    given["padding_idx"] = padding % example(weight).shape[0]
    call_instead(node, F.embedding, indices, weight, **given)


def name_condition_first(node: Node) -> None:
    """``x.where(condition, y)`` is ``torch.where(condition, x, y)``: Thunder takes the first for the condition."""
    named = arguments(node, "input", "condition", "other")
    if named.keys() == {"input", "condition", "other"}:
        call_instead(node, torch.where, named["condition"], named["input"], named["other"])


def scatter_without_waiting(node: Node) -> None:
    """Models of images and text place an image's values so. PyTorch's backward would read the mask on the host."""
    named = arguments(node, "input", "mask", "source")
    is_whole = named.keys() == {"input", "mask", "source"} and example(named["input"]).shape == example(node).shape
    if is_whole and requires_grad(example(node)):
        call_instead(node, operators.masked_scatter(), named["input"], named["mask"], named["source"])


def draw_without_gradient(node: Node) -> None:
    """``torch.bernoulli(x, p)`` is ``torch.empty_like(x).bernoulli_(p)``, but for a backward, in which PyTorch raises.

    So it is where nothing has a gradient that is computed with it, as ``mask == 1`` has none.
    """
    leading, waiting = dict[Node, None](), [node]
    while waiting:
        if (each := waiting.pop()) not in leading and requires_grad(example(each)):
            leading[each] = None
            waiting += each.users
        if each.op == "output" or written_by(each):
            return
    for each in leading:
        compute_with_grad_mode(each, enabled=False)
    tensor, *others = *node.args, *node.kwargs.values()
    if len(others) == 1 and isinstance(others[0], (int, float)) and example(node).is_contiguous():
        call_instead(node, operators.drawn("bernoulli_"), tensor, *others)


def unfold_to_new_memory(node: Node) -> None:
    """Thunder takes the method for the function of that name."""
    if not (_is_written(node) or is_returned_beside_another(node)):
        call_instead(node, operators.unfold(), *node.args, **node.kwargs)


def take_part_to_new_memory(node: Node) -> None:
    """``torch.real(x)`` of complex numbers, where anything has a gradient: Thunder has none of it, or another one."""
    if not has_another_derivative(node) or _is_written(node):
        return
    trains = any(requires_grad(example(each)) for each in node.graph.nodes)
    if requires_grad(example(node)) or (trains and not is_returned_beside_another(node)):
        call_instead(node, operators.part_of_complex(operator_name(node)), *node.args)


def _is_written(node: Node) -> bool:
    return shares_memory([example(written_by(each)) for each in node.graph.nodes], example(node))


def reshape_what_thunder_lays_out(node: Node) -> None:
    """What `torch.einsum` or `repeat_interleave` returns, which Thunder writes out, may have no such view there."""
    source: Any = node.args[0]
    is_laid_out = isinstance(source, Node) and operator_name(source) in ("einsum", "repeat_interleave")
    if is_laid_out and not any(isinstance(arg, torch.dtype) for arg in node.args) and not layout_counts(node):
        node.target = "reshape"
