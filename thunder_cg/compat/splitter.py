"""Has Thunder's splitter of Dynamo's graphs keep more operators, for ``thunderfx``. Checked with Thunder 0.2.6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import getclosurevars
from typing import Any
from unittest.mock import patch

import torch
from thunder.core.compile_data import get_compile_data
from thunder.dynamo import splitter, utils
from thunder.dynamo.utils import SplitReason, SplitReasonType
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from thunder_cg.compat.fx import (
    Autocast,
    autocasts_at,
    called_function,
    example,
    is_wait,
    trains_on_dtensors,
    without_gradient,
)
from thunder_cg.compat.tensors import is_inexact, tree_flatten
from thunder_cg.errors import SkipReason

_FALLBACKS = frozenset(utils.auto_register_ops)  # PyTorch's functions that Thunder calls as they are


def for_splitter(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of that name that does the same, and that Thunder's splitter takes for an operator of Thunder's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.replace(".", "_")
    call.thunder_supported = True  # type: ignore[attr-defined]
    call.__module__ = "builtins"  # in a checkpointed function, Thunder replaces what is not, by symbols of its own
    return call


def is_for_splitter(function: Any) -> bool:
    """Whether `for_splitter` made it."""
    return getattr(function, "thunder_supported", False) is True


def can_trace(function: Callable[..., Any], node: Node, options: dict[str, Any]) -> bool:
    """Whether Thunder can trace the function, and differentiate it if need be, with the arguments of the node."""
    can, _ = utils.try_execute_thunder_symbol(function, node, options)
    return can


def is_supported(node: Node, options: dict[str, Any], *, with_gradient: bool = True) -> bool:
    """Whether Thunder's symbol for what the node calls, or its fallback, takes the node's arguments."""
    if is_for_splitter(node.target):
        return can_trace(node.target, node, options if with_gradient else _untracked(options))  # type: ignore[arg-type]
    with patch.object(utils, "auto_register_ops", frozenset()):
        supported, _ = utils.is_node_supported_by_thunder(node, options if with_gradient else _untracked(options))
    return bool(supported)


def is_traced(node: Node, options: dict[str, Any]) -> bool:
    """Whether Thunder's splitter, as it is now, gives the node to Thunder."""
    traced, _ = utils.is_node_supported_by_thunder(node, options)
    return bool(traced)


def _untracked(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "disable_torch_autograd": True}


def is_differentiable(node: Node, options: dict[str, Any]) -> bool:
    """Whether Thunder's symbol for what the node calls takes its arguments where all floats require grad."""
    graph = Graph()

    def tracked(source: Node) -> Node:
        value, copied = example(source), graph.placeholder(source.name)
        is_float = is_inexact(value)
        copied.meta["example_value"] = value.detach().requires_grad_() if is_float else value
        return copied

    return is_supported(graph.node_copy(node, tracked), options)


def loses_wait(node: Node, options: dict[str, Any]) -> bool:
    """Whether it waits for a collective that Thunder does not trace. Thunder's symbol for a wait does nothing.

    All that Thunder traces is all_reduce, which it waits for itself. What does not follow at once may be traced apart.
    """
    if not is_wait(node):
        return False
    follows = node.args[0] is node.prev and str(node.prev.target) == "_c10d_functional.all_reduce"
    return not (follows and is_supported(node.prev, options))


def fallback_of(node: Node) -> Callable[..., Any] | None:
    """The operator that a node calls, if Thunder only calls it as it is; None for all others."""
    target = called_function(node)
    return target if target in _FALLBACKS else None


@contextmanager
def keeping_fallbacks(
    objection: Callable[[Node], SkipReason | None],
    rewrite: Callable[[GraphModule], None],
    join: Callable[[dict[Node, int], frozenset[int]], dict[Node, int]],
    around_inductor: Callable[[Callable[..., Any]], Callable[..., Any]],
    succeeded: set[Any],
) -> Iterator[None]:
    """Inside, Thunder's splitter keeps operators that Thunder calls as they are, if it can trace them.

    The splitter asks functions and a set of its module, which are replaced. Dynamo compiles under one lock, so no
    other compilation is affected.

    Args:
        objection: says of any node of the graph why Inductor gets it nevertheless.
        rewrite: gets each graph that was split, before its parts are compiled.
        join: gets the number of the part of each call in a graph, and the numbers of Thunder's parts, before it is
            split. It may rewrite the graph, and returns the numbers by which it is split.
        around_inductor: gets what has Inductor compile a piece, and returns what to call in its place.
        succeeded: trials of operators that need not be made again, to which others are added.
    """
    is_supported, try_symbol = utils.is_node_supported_by_thunder, utils.try_execute_thunder_symbol
    split = splitter.split_module
    untracked = cache(without_gradient)

    def split_balanced(module: GraphModule, split_callback: Callable[[Node], int], **kwargs: Any) -> GraphModule:
        parts = {node: split_callback(node) for node in module.graph.nodes if node.op.startswith("call")}
        parts = join(parts, frozenset(getclosurevars(split_callback).nonlocals["supported_partitions"]))
        module.recompile()
        whole = split(module, split_callback=parts.__getitem__, **kwargs)
        for part in whole.children():
            _restore_grad_mode(part)
        rewrite(whole)
        return whole

    def try_once(symbol: Any, node: Node, options: dict[str, Any]) -> tuple[bool, SplitReason | None]:
        casts = tuple(autocasts_at(node))
        key = _trial(symbol, node, options, casts)
        if key in succeeded:
            return True, None
        result = try_symbol(_under_autocast(symbol, casts), node, options)
        if key is not None and result[0]:
            succeeded.add(key)
        return result

    def is_kept(node: Node, options: dict[str, Any]) -> tuple[bool, SplitReason | None]:
        if (reason := objection(node)) is None:
            options = _untracked(options) if node.name in untracked(node.graph) else options
            return (True, None) if is_for_splitter(node.target) else is_supported(node, options)
        info = f"node with name: {node.name} and target: {node.target} {reason}"
        return False, SplitReason(SplitReasonType.MISSING_OP_SUPPORT, info)

    with (
        patch.object(utils, "auto_register_ops", frozenset()),
        patch.object(utils, "try_execute_thunder_symbol", try_once),
        patch.object(utils, "is_node_supported_by_thunder", is_kept),
        patch.multiple(splitter, is_node_supported_by_thunder=is_kept, split_module=split_balanced),
        patch.multiple(splitter, make_fake_arguments=fake_arguments, translate_dtensor_ops=_translate_dtensors),
        patch.object(torch._inductor, "compile", around_inductor(torch._inductor.compile)),
    ):
        yield


def _translate_dtensors(module: GraphModule) -> None:
    if not trains_on_dtensors(module.graph):  # else Inductor gets what makes DTensors, as Dynamo has written it
        utils.translate_dtensor_ops(module)


def fake_arguments(module: GraphModule) -> list[FakeTensor]:
    """Fake tensors for the inputs of a piece of a graph of Dynamo's.

    PyTorch (2.11) makes none of a view of real numbers as complex ones, so such a view is taken for a copy.
    """
    for node in module.graph.find_nodes(op="placeholder"):
        value = example(node)
        if isinstance(value, torch.Tensor) and value.is_complex():
            node.meta["example_value"] = value.detach().clone().requires_grad_(value.requires_grad)
    return utils.make_fake_arguments(module) or []


def _under_autocast(symbol: Any, casts: Sequence[Autocast]) -> Any:
    """A symbol that Thunder tries with its arguments cast, as it does where it traces under autocast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for each in casts:
            get_compile_data().autocast_stack.push(*each)
        return symbol(*args, **kwargs)

    return call if casts else symbol


def _trial(symbol: Any, node: Node, options: dict[str, Any], casts: Sequence[Autocast]) -> Any:
    """All that Thunder's trial of a symbol with a node's arguments depends on; None if that is not known to be all.

    A model repeats its layers, and a trial takes a tenth of a second, of a batch norm half a second: it traces and
    differentiates the symbol. PyTorch has taken these sizes already. Where no integer is among the arguments, Thunder
    only asks which sizes are equal, and which are 0 or 1.
    """
    leaves, structure = tree_flatten((node.args, node.kwargs))
    values = [*map(example, leaves)]
    sizes_count = any(type(value) in (int, slice) for value in values)
    known: list[Any] = []
    numbers: dict[int, str] = {}
    for value in values:
        if type(value) in (FakeTensor, torch.nn.Parameter) and all(type(size) is int for size in value.shape):
            shape = tuple(
                size if sizes_count or size <= 1 else numbers.setdefault(size, f"size {len(numbers)}")
                for size in value.shape
            )
            known.append((shape, value.dtype, value.device, value.requires_grad))
        elif isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype, torch.device, type(...))):
            known.append((type(value), repr(value)))
        elif isinstance(value, slice) and all(
            type(part) in (int, type(None)) for part in (value.start, value.stop, value.step)
        ):
            known.append(repr(value))
        else:
            return None
    defaults = torch.get_default_dtype(), torch.get_default_device()
    return symbol, structure, (*known,), options.get("disable_torch_autograd"), casts, defaults


def _restore_grad_mode(part: GraphModule) -> None:
    """Has a part of a graph that ends under ``torch.no_grad`` leave the grad mode as it is outside of the graph.

    PyTorch begins each part with the mode of its nodes. Thunder would leave the mode that it ends with to the caller,
    in the call that it is traced in.
    """
    modes = part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if modes and modes[-1].args[0] != torch.is_grad_enabled():
        *_, last = (node for node in part.graph.nodes if node.op != "output")
        with part.graph.inserting_after(last):
            part.graph.call_function(torch._C._set_grad_enabled, (torch.is_grad_enabled(),))
        part.recompile()


def can_trace_all(module: GraphModule, options: dict[str, Any]) -> bool:
    """Whether Thunder can trace all of a graph, without fallbacks and without gradients of it."""
    can, _ = utils.is_graphmodule_supported_by_thunder(module, _untracked(options))
    return bool(can) and not any(loses_wait(node, options) for node in module.graph.nodes)
