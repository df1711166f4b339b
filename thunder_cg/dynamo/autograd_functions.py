"""A ``torch.autograd.Function`` in a graph of Dynamo's, whose forward and backward are graphs of their own."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from thunder_cg.compat.fx import called_function, depends_on_autocast, example, modes_of, operator_name
from thunder_cg.compat.splitter import can_trace_all
from thunder_cg.dynamo.constants import is_size, size_at, write_out
from thunder_cg.dynamo.in_place import compute_out_of_place
from thunder_cg.dynamo.nodes import call_before, result_of, return_first_alone
from thunder_cg.dynamo.writes import written_by


def give_what_is_used(module: GraphModule) -> None:
    """Has the graphs of each function take and return what is used, and nothing else."""
    for calls in _calls(module.graph):
        if len(graphs := _graphs(calls[0], module)) == 2:
            _return_what_is_used(calls, *graphs)
            _take_no_sizes(calls, *graphs)
            for graph in graphs:
                graph.recompile()


def _graphs(call: Node, module: GraphModule) -> list[GraphModule]:
    """The forward and the backward that a node calls."""
    bodies = (module.get_submodule(str(arg.target)) for arg in call.args[:2] if isinstance(arg, Node))
    return [body for body in bodies if isinstance(body, GraphModule)]


def _calls(graph: Graph) -> list[list[Node]]:
    """The calls of each ``torch.autograd.Function``, as releases of PyTorch from 2.10 on write them."""
    calls: defaultdict[Any, list[Node]] = defaultdict(list)
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        if "args_tensor_mask" not in call.kwargs:
            calls[tuple(getattr(arg, "target", arg) for arg in call.args[:2])].append(call)
    return [*calls.values()]


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
        call.meta["example_value"] = tuple(example(call)[i] for i in kept)
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
    values = dict(zip(given, map(example, (*results, *saved)))) | {node: example(node) for node in taken}
    sizes = [node for node, value in values.items() if isinstance(value, torch.SymInt)]
    shown: dict[Node, Any] = {
        size: _dimension_of(values[size], taken if size in taken else given, values) for size in sizes
    }
    of_sizes = [gradients.args[0][taken.index(size)] for size in sizes if size in taken]
    if not sizes or None in shown.values() or any(each is not None for each in of_sizes):
        return
    kept = [i for i, value in enumerate(saved) if not isinstance(example(value), torch.SymInt)]
    tensors = [i for i, node in enumerate(taken) if node not in sizes]
    output.args = ((results, tuple(saved[i] for i in kept)),)
    gradients.args = (tuple(gradients.args[0][i] for i in tensors),)
    for size, (tensor, dim) in shown.items():
        if size.users:
            with size.graph.inserting_after([*size.graph.find_nodes(op="placeholder")][-1]):
                size.replace_all_uses_with(size_at(tensor, dim, values[size]))
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


def write_as_before(call: Node, module: GraphModule, options: dict[str, Any]) -> None:
    """A ``torch.autograd.Function`` as releases of PyTorch before 2.10 wrote it, which Thunder 0.2 can trace.

    Its graphs, forward and backward, took an object of Python first, and the call said which arguments are tensors.
    """
    is_new = "args_tensor_mask" not in call.kwargs and not call.kwargs.get("non_differentiable_idx")
    takes_tensors = all(isinstance(example(arg), torch.Tensor) for arg in call.args[2:])
    if not (is_new and takes_tensors):
        return
    graphs = _graphs(call, module)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    calls = [node for node in nodes if node.op.startswith("call")]
    with modes_of([call]) or nullcontext():
        if any(depends_on_autocast(node, called_function(node)) for node in calls):
            return  # of the backward, PyTorch casts nothing
    for node in nodes:
        if operator_name(node) == "clip":  # Thunder has the symbol, with another gradient, which is not asked for here
            node.target = "clamp" if node.op == "call_method" else torch.clamp
        elif is_size(node):
            write_out(node)
            continue
        compute_out_of_place(node, has_gradient=True)
    writes = any(written_by(node) for graph in graphs for node in graph.graph.nodes)
    if writes or len(graphs) < 2 or not _cast_gradients(graphs[1].graph, call.args[2:]):
        return
    if not all(can_trace_all(graph, options) for graph in graphs):
        return
    for graph in graphs:
        first = next(iter(graph.graph.nodes))
        if first.name != "ctx":  # else another call has the same graph
            with graph.graph.inserting_before(first):
                graph.graph.placeholder("ctx")
            graph.recompile()
    call.kwargs = {**call.kwargs, "args_tensor_mask": [True] * (len(call.args) - 2)}
    if len(example(call)) == 1:  # Thunder returns a single result without a tuple, so its item 0 would be its first row
        return_first_alone(call)


def _cast_gradients(backward: Graph, inputs: Sequence[Any]) -> bool:
    """Gives gradients the dtypes of the inputs, as autograd does. False if it would also sum what was broadcast."""
    output: Any
    (output,) = backward.find_nodes(op="output")
    gradients = []
    for gradient, of in zip(output.args[0], map(example, inputs)):
        value, args = example(gradient), (gradient, of.dtype)
        if getattr(value, "shape", of.shape) != of.shape:
            return False
        if getattr(value, "dtype", of.dtype) != of.dtype:
            gradient = call_before(output, torch.Tensor.to, args, result=result_of(torch.Tensor.to, args))
        gradients.append(gradient)
    output.args = ((*gradients,),)
    return True
