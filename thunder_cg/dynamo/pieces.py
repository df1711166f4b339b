"""Pieces of Inductor's inside of Thunder's traces.

What Thunder cannot trace, Inductor compiles. If that is a function of tensors alone, and a graph can hold its kernels,
it is one operator of the trace around it, and its backward is another. So a call remains one graph each way. The values
are those of the piece by itself: Inductor compiles the same forward and the same backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import count, groupby
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from thunder_cg.analysis import rules
from thunder_cg.compat.inductor import OneWay, compile_each_way, draws, is_called_as_it_is, name_of_kernel
from thunder_cg.compat.splitter import (
    JOINED,
    SeenNode,
    example,
    fake_arguments,
    for_splitter,
    is_of_unknown_size,
    is_read_number,
    modes_of,
)
from thunder_cg.compat.thunder import outside_of_autograd, symbol_of_function, with_derivative
from thunder_cg.compat.torch import autograd_base, is_wrapper, shares_storage, tree_leaves
from thunder_cg.dynamo.layouts import fixed_stride, is_refused_lstm
from thunder_cg.dynamo.operators import executor, in_layout
from thunder_cg.dynamo.writes import requires_grad, shares_memory, written_by

_numbers = count()


def join_pieces(parts: dict[Node, int], of_thunder: frozenset[int]) -> dict[Node, int]:
    """Replaces pieces of Inductor's in a graph by operators that Thunder traces.

    Args:
        parts: the number of the part that each call of the graph is in, in the order of the graph.
        of_thunder: those that Thunder compiles.

    Returns:
        The same for the graph as it is then.
    """
    parts = _read_where_used(parts, of_thunder)
    is_thunders: dict[Node, bool] = {}
    for number, group in groupby([*parts], parts.__getitem__):
        nodes, is_kept = [*group], number in of_thunder
        if not is_kept and of_thunder and (function := _as_operator(nodes)) is not None:
            nodes, is_kept = _replace(nodes, *function), True
        is_thunders.update(dict.fromkeys(nodes, is_kept))
    joined: dict[Node, int] = {}
    for _, group in groupby([*is_thunders], is_thunders.__getitem__):
        nodes = [*group]
        joined.update(dict.fromkeys(nodes, next(parts[node] for node in nodes if node in parts)))
    return joined


def _read_where_used(parts: dict[Node, int], of_thunder: frozenset[int]) -> dict[Node, int]:
    """In training, has each piece of Inductor's read the numbers from tensors that it takes from another part.

    Inductor (2.11) differentiates no piece that takes a float of which nothing is known, nor does Thunder differentiate
    a part that returns a number. Where the graph writes in place, a later read may find another number.
    """
    made = [example(node) for node in parts]
    trains = any(requires_grad(leaf) for leaf in tree_leaves(made))
    if not trains or any(map(written_by, parts)) or any(map(is_of_unknown_size, made)):  # another read, another size
        return parts
    found: dict[Node, int] = {}
    copies: dict[tuple[Node, int], Node] = {}

    def copied(number: Node, part: int) -> Node:
        if not is_read_number(example(number)) or parts.get(number, part) == part:
            return number
        if (number, part) not in copies:
            copies[number, part] = number.graph.node_copy(number, lambda each: copied(each, part))
            found[copies[number, part]] = part
        return copies[number, part]

    for node, part in parts.items():
        for number in node.all_input_nodes if part not in of_thunder else ():
            with node.graph.inserting_before(node):
                node.replace_input_with(number, copied(number, part))
        found[node] = part
    for number in dict.fromkeys(number for number, _ in reversed(copies)):
        if not number.users:
            del found[number]
            number.graph.erase_node(number)
    return found


def _as_operator(nodes: Sequence[Node]) -> tuple[Callable[..., Any], list[Node], list[Node]] | None:
    """What computes the results of a piece from its inputs, these inputs and these results; None if it is left."""
    inside = {*nodes}
    inputs = [*dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)]
    results = [node for node in nodes if not inside.issuperset(node.users)]
    values = [*map(example, inputs)]
    made = [*map(example, results)]
    modes = modes_of(nodes)
    if modes is None or not made or any(fixed_stride(value) is None or is_wrapper(value) for value in (*values, *made)):
        return None
    if len({value.device for value in (*values, *made)}) > 1 or any(each.op == "get_attr" for each in inputs):
        return None
    if any(value.dim() == 0 and value.device.type == "cpu" for value in made):
        return None  # see Note [Gradients of CPU scalars] in analysis/gradients.py
    if any(map(is_refused_lstm, nodes)) or any(
        shares_memory([*values, *made[:i]], value) for i, value in enumerate(made)
    ):
        return None
    piece = _graph_of(nodes, inputs, results)
    try:
        with modes:
            compiled = compile_each_way(piece, fake_arguments(piece), _is_refused)
    except Exception:  # as where it reads on the host what a tensor holds: the splitter finds out and says so
        return None
    return (_in_trace(*compiled, len(results)), inputs, results) if compiled is not None else None


def _graph_of(nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = [copies[node] for node in results]
    for i, node in enumerate(results):
        if autograd_base(example(node)) is not None:  # of what is in the piece: it would return that, too
            returned[i] = graph.call_method("clone", (returned[i],))
    graph.output((*returned,))
    return GraphModule(torch.nn.Module(), graph)


def _replace(
    nodes: Sequence[Node], function: Callable[..., Any], inputs: Sequence[Node], results: Sequence[Node]
) -> list[Node]:
    """Calls the function in the place of the nodes. Returns the new nodes."""
    graph = nodes[0].graph
    with graph.inserting_before(nodes[-1]):  # an input of the graph may come late
        call = graph.call_function(function, (*inputs,))
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
    call.meta.update(results[0].meta, example_value=(*map(example, results),))
    call.meta[JOINED] = {node.name: SeenNode.of(node) for node in nodes}  # for reports
    for result, item in zip(results, items):
        item.meta.update(result.meta)
        result.replace_all_uses_with(item)
    for node in reversed(nodes):
        graph.erase_node(node)
    return [call, *items]


def _is_refused(function: Any) -> bool:
    """Whether a graph may be unable to hold what an operator of PyTorch's does, which Inductor compiles."""
    if function is operator.getitem:
        return False
    if (name := name_of_kernel(function)) is None:
        return True
    if (rule := rules.find("torch", name)) is None:
        return is_called_as_it_is(function)
    return not rule.captures or any(each.cause is not None for each in rule.conditions)


def _in_trace(forward: OneWay, backward: OneWay | None, with_gradient: Sequence[int], results: int) -> Any:
    """A function that Thunder's splitter takes for one of Thunder's, and that is two operators in its traces.

    What the backward gets of the memory of an argument or a result, it makes of that.
    """
    places = [*forward.inputs, *forward.results[:results]]
    saved: list[tuple[int, Any]] = []  # where the backward finds each, and what it has the memory of
    returned = [*range(results)]
    for i, value in enumerate(forward.results[results:], results):
        base = next((j for j, place in enumerate(places) if shares_storage([place], value)), None)
        if base is None:
            saved.append((len(forward.inputs) + len(returned), None))
            returned.append(i)
        else:
            saved.append((base, places[base]))
    compute = _symbol("", forward, [forward.results[i] for i in returned], _runs(forward, returned))
    differentiate = None
    if backward is not None:
        viewed = [(base, value) for (_, base), value in zip(saved, forward.results[results:])]
        differentiate = _symbol("_backward", backward, backward.results, _runs(backward, None, viewed))

    def run_forward(*tensors: Any) -> Any:
        values = (*tensors, *compute(*tensors))
        made = values[len(tensors) :][:results]
        return made, tuple(values[place] for place, _ in saved)

    def run_backward(*given: Any) -> Any:
        gradients, values = given[:results], given[results:]
        if differentiate is None:
            return (None,) * len(forward.inputs)
        return differentiate(*values, *(gradients[i] for i in with_gradient))

    def call(*tensors: Any) -> Any:
        return with_derivative(run_forward, run_backward, *tensors)

    return for_splitter(call, "inductor_piece")


def _symbol(kind: str, way: OneWay, results: Sequence[Any], run: Callable[..., Any]) -> Any:
    def made(*tensors: torch.Tensor) -> Any:
        tracked = any(tensor.requires_grad for tensor in tensors)
        return tuple(None if value is None else _like(value, tracked=tracked) for value in results)

    suffix = "_draws" if any(map(draws, way.functions)) else ""
    name = f"piece{kind}{suffix}"
    return symbol_of_function(executor, name, f"inductor_{name}{next(_numbers)}", outside_of_autograd(run), made)


def _like(value: torch.Tensor, *, tracked: bool) -> torch.Tensor:
    has_gradient = tracked and (value.is_floating_point() or value.is_complex())
    return torch.empty(value.shape, dtype=value.dtype, device=value.device, requires_grad=has_gradient)


def _runs(way: OneWay, returned: Sequence[int] | None, viewed: Sequence[tuple[Any, Any]] = ()) -> Callable[..., Any]:
    """Calls what Inductor has compiled, with tensors laid out as it takes them. What it returns is in new memory.

    Args:
        returned: the positions of the results; None for all.
        viewed: for the first tensors, what has the memory of each, if the trace gives that, and the view of it.
    """
    viewed = [*viewed, *((None, None) for _ in way.inputs[len(viewed) :])]

    def run(*tensors: torch.Tensor) -> Any:
        given = []
        for tensor, taken, (base, view) in zip(tensors, way.inputs, viewed):
            if base is None:
                given.append(in_layout(tensor, taken.stride()))
            else:
                tensor = in_layout(tensor, base.stride())
                offset = tensor.storage_offset() + view.storage_offset() - base.storage_offset()
                given.append(tensor.as_strided(view.size(), view.stride(), offset))
        seen, found = [*given], []
        results = way.run(given)
        for i in range(len(results)) if returned is None else returned:
            result = results[i]
            if result is not None:
                result = result.clone() if shares_storage(seen, result) else result
                seen.append(result)
            found.append(result)
        return tuple(found)

    return run
