"""What is written differently in a graph of Dynamo's, so that Thunder can trace it. The values are the same bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from thunder_cg.compat.fx import (
    GET_DATA,
    LOG_USAGE,
    checkpoints,
    compute_with_grad_mode,
    drop_switches_of_saved_tensor_hooks,
    example,
    inside_transforms,
    is_collective,
    modes_of,
    operator_name,
    without_gradient,
)
from thunder_cg.compat.operators import is_tensor_of_sizes
from thunder_cg.compat.splitter import is_differentiable, is_supported
from thunder_cg.compat.tensors import is_cpu_scalar, is_inexact, tensors_in, tree_leaves
from thunder_cg.dynamo import autograd_functions, calls, constants, copies, in_place, own_symbols
from thunder_cg.dynamo.layouts import LIKE, lay_out_before_strides, make_as_laid_out
from thunder_cg.dynamo.nodes import call_instead, drop_unused, replace
from thunder_cg.dynamo.writes import DRAWS, NEW, requires_grad, shares_memory, written_by

# What is done with a call, by its function or the name of its method.
_CALLS: dict[Any, Callable[[Node], None]] = {
    **dict.fromkeys(DRAWS, in_place.draw_out_of_place),
    **dict.fromkeys(LIKE, make_as_laid_out),
    **dict.fromkeys(constants.OF_NUMBERS, constants.name_function_of_numbers),
    **dict.fromkeys((torch.as_tensor, torch.tensor), constants.make_tensor),
    **dict.fromkeys(constants.LEGACY, constants.name_legacy_constructor),
    **dict.fromkeys(("norm", torch.norm), calls.name_vector_norm),
    math.prod: calls.multiply_one_by_one,
    operator.getitem: constants.write_index,
    torch.cat: calls.drop_empty_parts,
    torch.broadcast_shapes: constants.write_broadcast_sizes,
    **dict.fromkeys((torch.cuda.get_device_capability, LOG_USAGE), drop_unused),  # Dynamo has used it
    torch.einsum: calls.pass_each_operand,
    **dict.fromkeys(("index_put", torch.index_put), copies.put_to_copy),
    **dict.fromkeys((torch.imag, torch.real), calls.take_part_to_new_memory),
    **dict.fromkeys(("bernoulli", torch.bernoulli), calls.draw_without_gradient),
    F.embedding: calls.embed_with_padding,
    F.multi_head_attention_forward: own_symbols.trace_multi_head_attention,
    "masked_scatter": calls.scatter_without_waiting,
    "unfold": calls.unfold_to_new_memory,
    "view": calls.reshape_what_thunder_lays_out,
    "where": calls.name_condition_first,
}


def rewrite(module: GraphModule, options: dict[str, Any], *, is_checkpointed: bool = False) -> None:
    """Rewrites the graph in place.

    Args:
        options: those of ``thunder.jit`` that the graph is to be compiled with.
        is_checkpointed: whether it is the graph of a checkpointed function, of which Inductor gets all or nothing.
    """
    drop_switches_of_saved_tensor_hooks(module.graph)
    constants.write_floats(module.graph)
    _detach_data(module.graph)
    constants.read_sizes_first(module.graph)
    for call in checkpoints(module.graph):
        _rewrite_checkpointed(call, module, options)
    autograd_functions.give_what_is_used(module)
    transformed = inside_transforms(module.graph)
    constants.write_constants(module.graph, transformed)
    if not (is_checkpointed or transformed):  # a checkpointed function would write once more
        in_place.keep_gradients(module.graph)
    nodes = [node for node in module.graph.nodes if node.name not in transformed]
    for node in nodes:
        calls.cast_as_autocast_does(node)
        constants.store_at_tensors(node)
    in_place.write_as_thunder_does(module.graph, nodes, options)
    for node in nodes:
        calls.name_as_thunder_does(node)
        calls.pass_by_position(node)
    for node in (node for node in nodes if node.op in ("call_function", "call_method")):
        if (write := _CALLS.get(node.target)) is not None:
            write(node)
        elif is_tensor_of_sizes(node.target):
            constants.make_tensor(node)
        elif constants.is_size(node):
            constants.write_out(node)
        elif node.target is torch.ops.higher_order.autograd_function_apply and not is_checkpointed:
            autograd_functions.write_as_before(node, module, options)
        elif is_collective(node):
            own_symbols.wait_in_trace(node, options)
        else:
            own_symbols.use_own_operator(node, options)
    constants.compute_numbers_first(module.graph)
    lay_out_before_strides(module.graph)
    _leave_out_of_backward(module.graph, transformed, options)


def _rewrite_checkpointed(call: Node, module: GraphModule, options: dict[str, Any]) -> None:
    """Rewrites a checkpointed function, which is a graph of its own.

    Its constants go there: Thunder takes tensors and numbers of the graph alone. What is checkpointed inside of it is
    written out, and so is the function if there is no gradient.
    """
    function: Any = call.args[0]
    body: Any = module.get_submodule(function.target)
    for placeholder, arg in zip(body.graph.find_nodes(op="placeholder"), call.args[1:]):
        if not isinstance(arg, Node):
            replace(placeholder, arg)
    call.args = (function, *(arg for arg in call.args[1:] if isinstance(arg, Node)))
    call.update_kwarg("use_reentrant", False)  # which Thunder demands; what is computed once more is the same
    for inner in checkpoints(body.graph):
        _rewrite_checkpointed(inner, body, options)
    for inner in checkpoints(body.graph):
        _write_out_checkpointed(inner, body)
    calls = [node for node in body.graph.nodes if node.op.startswith("call")]
    if any(requires_grad(example(node)) for node in calls):
        with modes_of([call]) or nullcontext():  # whose autocast is not in the graph of the function
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


def _detach_data(graph: Graph) -> None:
    """``x.data`` is ``x.detach()`` where nothing writes to its memory, in the graph or later.

    Not beside 0-dim tensors on the CPU, for which Thunder computes a gradient: see `returns_cpu_scalar`.
    """
    *_, output = graph.nodes
    if any(map(is_cpu_scalar, tensors_in([*map(example, graph.nodes)]))):
        return
    returned = [each for each in tensors_in(example(output.args)) if not each.requires_grad]
    kept = [returned, *(example(written_by(node)) for node in graph.nodes)]
    for node in graph.find_nodes(op="call_function", target=GET_DATA):
        if not shares_memory(kept, example(node)):
            call_instead(node, torch.Tensor.detach, *node.args)


def _leave_out_of_backward(graph: Graph, transformed: frozenset[str], options: dict[str, Any]) -> None:
    """Of what has no gradient, Thunder differentiates what it can, such as ``x * 2``, and raises for the rest.

    The rest, such as ``x.round()`` of a float without one, ``x.isfinite()`` of any and ``x[mask] = y``, is computed
    under ``torch.no_grad``, of which it knows. So is ``x.diagonal()``, of which it would make a copy.
    """
    nodes = [*graph.nodes]
    if not any(requires_grad(example(node)) for node in nodes):
        return
    untracked = transformed | without_gradient(graph)
    for node in nodes:
        is_call = node.op in ("call_function", "call_method") and node.name not in untracked
        has_gradient = any(map(requires_grad, tree_leaves((example(node), example(written_by(node))))))
        if not is_call or has_gradient or not any(map(is_inexact, tensors_in(example(node.all_input_nodes)))):
            continue
        writes = NEW not in node.meta and written_by(node) and node.target is not operator.setitem
        is_differentiated = operator_name(node) != "diagonal" and is_differentiable(node, options)
        if not (writes or is_differentiated) and is_supported(node, options, with_gradient=False):
            compute_with_grad_mode(node, enabled=False)
