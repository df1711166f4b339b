"""How a node of a graph of Dynamo's becomes another call, or gets one before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from thunder_cg.compat.fx import example, on_examples


def is_number(node: Node) -> bool:
    """Whether a node makes a number that Dynamo has no value of."""
    return isinstance(example(node), (torch.SymInt, torch.SymFloat, torch.SymBool))


def called(function: Callable[..., Any]) -> tuple[str, Any]:
    """The kind and the target of a node that calls a function, or a method of tensors."""
    is_method = inspect.ismethoddescriptor(function)
    return ("call_method", function.__name__) if is_method else ("call_function", function)


def call_instead(node: Node, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Has a node call another function, or another method of tensors, with these arguments."""
    node.op, node.target = called(function)
    node.args, node.kwargs = args, kwargs


def call_before(
    node: Node,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    result: Any,
) -> Node:
    """A new node before another one, at its line of the user's.

    Args:
        result: the example of what it returns.
    """
    with node.graph.inserting_before(node):
        new = node.graph.create_node(*called(function), args, kwargs)
    new.meta.update(node.meta, example_value=result)
    return new


def result_of(function: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """What a function returns for the examples of a node's arguments."""
    return on_examples(function, example(args), example(kwargs or {}))


def replace(node: Node, value: Any) -> None:
    """Puts a value that is no node in the place of one."""
    for user in [*node.users]:
        user.args, user.kwargs = map_aggregate((user.args, user.kwargs), lambda arg: value if arg is node else arg)
    node.graph.erase_node(node)


def drop_unused(node: Node) -> None:
    """Drops a node that nothing takes the result of."""
    if not node.users:
        node.graph.erase_node(node)


def later(node: Node) -> set[Node]:
    """The nodes of the graph that come after this one."""
    nodes = [*node.graph.nodes]
    return {*nodes[nodes.index(node) + 1 :]}


def use_later(node: Node, old: Node, new: Node) -> None:
    """Has the nodes after one use a new value in the place of an old one."""
    for user in later(node).intersection(old.users):
        user.replace_input_with(old, new)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a node that is passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def first_argument(node: Node) -> Any:
    return node.args[0] if node.args else None


def arguments(node: Node, *names: str) -> dict[str, Any]:
    """The arguments of a node by name, those by position in the order of the names."""
    return {**dict(zip(names, node.args)), **node.kwargs}


def return_first_alone(node: Node) -> None:
    """What is called returns the first of its results, and no tuple; the others are not used."""
    node.meta["example_value"] = example(node)[0]
    for item in [*node.users]:
        if item.args[1] == 0:
            item.replace_all_uses_with(node)
        item.graph.erase_node(item)


def copied(module: GraphModule) -> GraphModule:
    """A copy, with the graphs that it calls: Inductor rewrites what it compiles, and what prepares for Thunder does."""
    graph, nodes = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    copy = GraphModule(module, graph)
    for name, called in [*copy.named_children()]:
        if isinstance(called, GraphModule):
            setattr(copy, name, copied(called))
    return copy
