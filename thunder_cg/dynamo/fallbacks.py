"""What is left to Inductor, and why: mostly operators that Thunder only calls as they are, its fallbacks.

Note [Fallbacks that Thunder traces wrongly]
    The backward of a fallback runs the operator again, under autograd, so one that draws would draw other numbers.
    Tensors in a list get no gradient. What a fallback writes is unknown to the trace. It runs without autocast. A few
    others were found by comparing all fallbacks with PyTorch, values and gradients: tests/dynamo/test_fallbacks.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from thunder_cg.analysis import rules
from thunder_cg.analysis.rules import Reason
from thunder_cg.compat.dynamo import (
    example,
    fallback_of,
    inside_transforms,
    on_examples,
    operator_name,
    without_gradient,
)
from thunder_cg.compat.thunder import no_autocast, symbols_of_functions
from thunder_cg.compat.torch import has_storage, shares_storage, tree_leaves

# Their gradients, or which results have one, are not PyTorch's.
_WRONG = frozenset({"lu", "lu_unpack", "native_layer_norm", "norm"})
IN_PLACE = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}


def objections(graph: Graph) -> Callable[[Node], str | None]:
    """Says of a node of the graph why it is left to Inductor, to be read after its name; None if Thunder traces it."""
    transformed = inside_transforms(graph)
    lost, untracked = untracked_writes(graph), without_gradient(graph)

    def objection(node: Node) -> str | None:
        if node.name in transformed:
            return "is inside of torch.vmap or another transform of torch.func, which Thunder does not see"
        if node.target is torch.ops.higher_order.autograd_function_apply and "args_tensor_mask" not in node.kwargs:
            return "is a torch.autograd.Function, which Thunder knows only as older releases of PyTorch wrote it"
        if node.name in lost:
            return "writes in place, without a gradient, to a tensor that has one, which Thunder loses"
        is_tracked = _requires_grad(result := example(node)) and node.name not in untracked
        if is_tracked and node.op.startswith("call"):
            name = operator_name(node)
            if name.rstrip("_") == "index_put":
                return "gets other gradients from Thunder than from PyTorch"
            if name.endswith("_") and not name.endswith("__") and _writes_view(node, result):
                return "writes in place through a view, whose gradient Thunder loses"
        function = fallback_of(node)
        return objection_to_fallback(node, function) if function is not None else None

    return objection


def untracked_writes(graph: Graph) -> frozenset[str]:
    """Names of the nodes that write, with no gradient, to tensors that require one, and of the views they write to.

    Such as ``w.mul_(0.9)`` under ``torch.no_grad``, or ``w.data.clamp_(0, 1)``. Where nothing in the graph has a
    gradient, as in an optimizer's step, there is none. Writes to what the graph makes and views are not among them:
    Inductor may not write to views that Thunder returns.
    """
    untracked = without_gradient(graph)
    nodes = [node for node in graph.nodes if _requires_grad(_result(node))]
    if not any(node.op.startswith("call") and node.name not in untracked for node in nodes):
        return frozenset()
    tracked = [_result(node) for node in nodes]
    found: dict[str, Any] = {}
    for node in graph.nodes:
        written = _written(node)
        is_tracked = node.name not in untracked and (_requires_grad(written) or _requires_grad(_result(node)))
        if written is None or is_tracked or not _shows(written, tracked):
            continue
        names = [other for other in graph.nodes if _written(other) is None and _shows(_result(other), [written])]
        if len(names) == 1 or any(other.op == "placeholder" for other in names):
            found[node.name] = written
    memory = [*found.values()]
    views = [node.name for node in graph.nodes if node.name in untracked and memory and _shows(_result(node), memory)]
    return frozenset([*found, *views])


def objection_to_fallback(node: Node, function: Callable[..., Any]) -> str | None:
    """Why a call of a fallback is left to Inductor; None if Thunder traces it right."""
    args = example(node.args)
    leaves = tree_leaves((args, example(node.kwargs)))
    if any(isinstance(leaf, torch.SymFloat) for leaf in leaves):
        return "takes a number that is read from a tensor, which Thunder does not take from a graph of Dynamo's"
    with_gradient = any(map(_requires_grad, leaves))
    if (problem := objection_to_operator(function, with_gradient=with_gradient)) is not None:
        return problem
    if any(_requires_grad(leaf) for arg in args if isinstance(arg, (list, tuple)) for leaf in tree_leaves(arg)):
        return "takes a list of tensors, whose gradients Thunder's fallback for it loses"
    if depends_on_autocast(node, function):
        return "has another dtype under autocast, which Thunder's fallback for it does not see"
    return None


def objection_to_operator(function: Callable[..., Any], *, with_gradient: bool) -> str | None:
    """Why all calls of a fallback are left to Inductor, or all where a gradient is wanted."""
    id_ = symbols_of_functions()[function].id
    rule = rules.find(None, id_)
    if rule is None or rule.cause.reason is Reason.SIDE_EFFECT or rule.writes:
        return "may write its inputs or other state, of which Thunder's fallback for it says nothing"
    if with_gradient and id_.rsplit(".", 1)[-1] in _WRONG:
        return "gets other gradients from Thunder's fallback for it than from PyTorch"
    if with_gradient and rule.draws:
        return "draws, and Thunder's fallback for it draws again in its backward"
    return None


def depends_on_autocast(node: Node, function: Callable[..., Any]) -> bool:
    """Whether the function that a node calls has results of other dtypes without the autocast that Dynamo saw."""
    found = on_examples(no_autocast(function), example(node.args), example(node.kwargs))
    return _dtypes(node.meta.get("example_value")) != _dtypes(found)


def _result(node: Node) -> Any:
    return node.meta.get("example_value")


def _shows(result: Any, tensors: list[torch.Tensor]) -> bool:
    return isinstance(result, torch.Tensor) and has_storage(result) and shares_storage(tensors, result)


def _written(node: Node) -> torch.Tensor | None:
    """The tensor that an operator in place writes."""
    name = operator_name(node)
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = node.target is operator.setitem or node.target in IN_PLACE
    if not node.args or not (is_method or is_operator or node.kwargs.get("inplace") is True):
        return None
    written = example(node.args[0])
    return written if isinstance(written, torch.Tensor) else None


def _writes_view(node: Node, result: torch.Tensor) -> bool:
    """Whether an operator in place has written to a view of another tensor of the graph."""
    written = node.args[0]
    sources = written.all_input_nodes if isinstance(written, Node) else []
    return has_storage(result) and shares_storage(example(sources), result)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _dtypes(results: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
