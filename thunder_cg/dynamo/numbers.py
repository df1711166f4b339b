"""Python numbers among the results of a graph of Dynamo's, or of its parts, such as how many tokens a cache has had.

Thunder compiles anew for each value of a number that it gets. A number that is computed from numbers alone needs no
Thunder, so it is computed beside the graph, and what is left of the graph often takes none.

What Thunder differentiates returns tensors alone: it raises if there is a number among them. So one part of a graph
gives another no number, which is computed beside the parts.

Where a number is only added to positions, or compared with them, the graph gets a tensor instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from thunder_cg.compat.dynamo_scope import specialize
from thunder_cg.compat.fx import (
    called_function,
    compute_again,
    example,
    inside_transforms,
    on_examples,
    operator_name,
    symbols_of_sizes,
)
from thunder_cg.dynamo.nodes import is_number
from thunder_cg.dynamo.writes import IN_PLACE

Compiled = Callable[..., Any]

# What Thunder computes with a number that it does not know, of a tensor or of another number.
_ARITHMETIC = {"add", "sub", "mul", "truediv", "div", "neg", "eq", "ne", "lt", "le", "gt", "ge"}
# Integers and booleans, whatever the number is. By the function: one of the user's may have such a name, too.
_WITH_POSITIONS = frozenset(
    getattr(of, name)
    for name in _ARITHMETIC - {"truediv", "div", "neg"}
    for of in (operator, torch, torch.Tensor)
    if hasattr(of, name)
)


def specialize_floats(whole: GraphModule) -> None:
    """Has floats that change be constants of the graph where an operator needs to know them, as dropout its ``p``.

    Dynamo passes such a float as a tensor, and the graph reads it. Thunder does not ask for the value while it traces,
    so that some of its operators refuse the number, and others take the wrong branch, as ``torch.add(x, y, alpha=p)``.

    Raises:
        TensorifyScalarRestartAnalysis: Dynamo is to trace anew.
    """
    modules = [each for each in whole.modules() if isinstance(each, GraphModule)]  # of checkpointed functions, too
    for node in (node for module in modules for node in module.graph.nodes):
        name = operator_name(node)
        is_arithmetic = name.removesuffix("_") in _ARITHMETIC or node.target in IN_PLACE
        if node.op != "output" and (node.kwargs or not is_arithmetic):
            specialize(source.meta.get("example_value") for source in node.all_input_nodes)


def take_out_numbers(module: GraphModule) -> Callable[[Compiled], Compiled]:
    """Takes such results out of a graph. Returns what puts them back into the results of the compiled graph."""
    *_, output = module.graph.nodes
    results = output.args[0] if isinstance(output.args[0], Sequence) else ()
    beside, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        is_computed = (
            node.op == "call_function" and is_number(node) and all(map(copies.__contains__, node.all_input_nodes))
        )
        if node.op == "placeholder" or is_computed:
            copies[node] = beside.node_copy(node, copies.__getitem__)
    places = {i for i, node in enumerate(results) if node in copies and is_number(node)}
    if not places or len(places) == len(results):  # a graph without results is left as it is
        return lambda compiled: compiled
    beside.output(tuple(copies[results[i]] for i in sorted(places)))
    numbers = GraphModule(module, beside)
    output.args = (tuple(node for i, node in enumerate(results) if i not in places),)
    for node in reversed([*copies]):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)
    module.recompile()

    def put_back(compiled: Compiled) -> Compiled:
        def whole(*inputs: Any) -> tuple[Any, ...]:
            rest, counted = iter(compiled(*inputs)), iter(numbers(*inputs))
            return tuple(next(counted) if i in places else next(rest) for i in range(len(results)))

        return whole

    return put_back


def pass_as_tensors(module: GraphModule) -> Callable[[Compiled], Compiled]:
    """Has a graph take 0-dim tensors for numbers that meet only tensors of integers, as in ``torch.arange(4) + n``.

    Returns what makes these tensors for the compiled graph, in each call.
    """
    sizes = symbols_of_sizes(*(node for node in module.graph.nodes if isinstance(example(node), torch.Tensor)))
    transformed = inside_transforms(module.graph)
    devices = dict[int, torch.device]()
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if isinstance(example(node), torch.SymInt) and sizes.isdisjoint(symbols_of_sizes(node)):
            others = [_positions(user, node) for user in node.users]
            found = {other.device for other in others if other is not None}
            if len(found) == 1 and None not in others and transformed.isdisjoint(user.name for user in node.users):
                node.meta["example_value"] = on_examples(torch.Tensor.new_empty, (others[0], ()), {})
                (devices[i],) = found

    def with_tensors(compiled: Compiled) -> Compiled:
        def whole(*inputs: Any) -> Any:
            given = [*inputs]
            # PyTorch adds larger ones, too, but makes no such tensor of them: Thunder compiles for each.
            for i, device in devices.items():
                if inputs[i].bit_length() < 64:
                    given[i] = torch.full((), inputs[i], dtype=torch.int64, device=device)
            return compiled(*given)

        return whole

    return with_tensors if devices else lambda compiled: compiled


def _positions(user: Node, number: Node) -> torch.Tensor | None:
    """The tensor of integers that a number is added to, or the like; None if it is something else that is done."""
    first, second = map(example, user.args) if len(user.args) == 2 else (None, None)
    tensor = second if user.args[0] is number else first
    is_of_integers = isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int64 and tensor.dim() > 0
    return tensor if is_of_integers and not user.kwargs and called_function(user) in _WITH_POSITIONS else None


def take_out_numbers_of_parts(whole: GraphModule) -> None:
    """Takes numbers out of what the parts of a split graph return, in place, and computes them beside the parts."""
    for call in whole.graph.find_nodes(op="call_module"):
        part: Any = whole.get_submodule(call.target)
        *_, output = part.graph.nodes
        results = output.args[0]
        if isinstance(results, Node):  # returned alone, without a tuple
            _compute_before(call, results, call)
            continue
        kept = [result for result in results if not is_number(result)]
        for item in [*call.users]:
            result = results[item.args[1]]
            if is_number(result) and _compute_before(call, result, item):
                whole.graph.erase_node(item)
            elif is_number(result):
                specialize([result.meta["example_value"]])
                kept.append(result)
        for item in [*call.users]:
            item.update_arg(1, kept.index(results[item.args[1]]))
        output.args = (tuple(kept),)
        part.recompile()
    whole.recompile()


def _compute_before(call: Node, result: Node, item: Node) -> bool:
    """Has a number that a part returns computed before it is called. Returns whether that is possible."""
    with call.graph.inserting_before(call):
        number = compute_again(result, call.graph) if is_number(result) else None
    for user in [*item.users] if number is not None else ():
        user.args = map_arg(user.args, lambda node: number if node is item else node)
        user.kwargs = map_arg(user.kwargs, lambda node: number if node is item else node)
    return number is not None
