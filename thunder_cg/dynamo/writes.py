"""What a graph of Dynamo's writes in place, and where the order of writes and reads counts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import chain, groupby, takewhile
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from thunder_cg.compat.fx import called_function, example, operator_name, without_gradient
from thunder_cg.compat.operators import draws, mutated
from thunder_cg.compat.tensors import autograd_base, has_storage, shares_storage, storage_id, tensors_in

# Operators of Python's that write to their first argument, and those that compute what they write.
IN_PLACE = {
    getattr(operator, f"i{name}"): getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}

NEW = "thunder_cg.new"  # of nodes whose results are in new memory, unlike their examples
DRAWS = frozenset(["bernoulli_", "exponential_", "normal_", "uniform_"])  # as methods that write

# Draws that Thunder writes with random numbers of a shape, which wait for nothing. By name, those whose numbers are not
# PyTorch's in training anyway, or that draw nothing without dropout.
_WAIT_FOR_NOTHING = frozenset(
    [
        *(torch.bernoulli, torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint),
        *(torch.randint_like, torch.Tensor.bernoulli),
        *("dropout", "scaled_dot_product_attention", "gru", "lstm", "rnn_relu", "rnn_tanh"),
    ]
)


def is_named_in_place(node: Node) -> bool:
    """Whether the name of an operator says that it writes to its first argument, as that of ``add_`` does.

    Not ``operator.and_``, which ``x & y`` is in a graph of Dynamo's: without ``_`` it would be a keyword.
    """
    name = operator_name(node)
    return name.endswith("_") and not (name.endswith("__") or iskeyword(name[:-1]))


def out_of_place(node: Node) -> Callable[..., Any] | None:
    """The operator that computes what an operator in place writes to its first argument."""
    if node.op == "call_function" and node.target in IN_PLACE:
        return IN_PLACE[node.target]
    if callable(node.target) and node.kwargs.get("inplace") is True:
        return node.target
    if node.op == "call_method" and is_named_in_place(node):
        function = getattr(torch.Tensor, str(node.target)[:-1], None)
        return function if callable(function) else None
    return None


def is_alike(fresh: torch.Tensor, written: torch.Tensor) -> bool:
    return (fresh.dtype, fresh.shape) == (written.dtype, written.shape)


def replaces_memory(node: Node) -> bool:
    """Whether it gives a tensor other memory, as ``x.data = y`` does, which Dynamo writes as ``x.set_(y)``."""
    return operator_name(node) == "set_"


def written_by(node: Node) -> list[Any]:
    """What an operator writes in place, as arguments of its node."""
    is_operator = node.target in IN_PLACE or node.target is operator.setitem
    writes = is_named_in_place(node) or is_operator or node.kwargs.get("inplace") is True
    written = [*(node.args[:1] if writes else ()), *([node.kwargs["out"]] if "out" in node.kwargs else ())]
    return [*written, *mutated(node.target, node.args, node.kwargs)]


def shares_memory(values: Any, others: Any) -> bool:
    """Whether a tensor of one of the values shares memory with one of the others."""
    return any(has_storage(tensor) and shares_storage(values, tensor) for tensor in tensors_in(others))


def is_returned(node: Node) -> bool:
    """Whether memory of the result of a node is returned."""
    *_, output = node.graph.nodes
    return shares_memory([example(node)], example(output.args))


def is_returned_beside_another(node: Node) -> bool:
    """Whether the result of a node, or a view of it, is returned, and what else shares its memory is, or is an input.

    What is written to one of them later shows in the others.
    """
    *_, output = node.graph.nodes
    names = [*output.all_input_nodes, *node.graph.find_nodes(op="placeholder")]
    shared = [name for name in names if name is node or shares_memory([example(node)], example(name))]
    made_of_it = [name for name in shared if name is node or node in ancestors(name)]
    return 0 < len(made_of_it) < len(shared)


def makes_only_views(graph: Graph) -> bool:
    """Whether all tensors that a graph makes are views of its inputs, and it writes nothing: it runs no kernel."""
    inputs = [example(node) for node in graph.nodes if not node.op.startswith("call")]
    calls = [node for node in graph.nodes if node.op.startswith("call")]
    return bool(calls) and not any(
        written_by(node) or not shares_memory(inputs, value) for node in calls for value in tensors_in(example(node))
    )


def untracked_writes(graph: Graph) -> frozenset[str]:
    """Names of the nodes that write, with no gradient, to tensors that require one, and of the views they write to.

    Such as ``w.mul_(0.9)`` under ``torch.no_grad``, or ``w.data.clamp_(0, 1)``. Where nothing in the graph has a
    gradient, as in an optimizer's step, there is none. Writes to what the graph makes and views are not among them:
    Inductor may not write to views that Thunder returns.
    """
    untracked = without_gradient(graph)
    nodes = [node for node in graph.nodes if requires_grad(example(node))]
    if not any(node.op.startswith("call") and node.name not in untracked for node in nodes):
        return frozenset()
    tracked = [example(node) for node in nodes]
    writes: dict[str, Any] = {}
    for node in graph.nodes:
        written = _written(node)
        is_tracked = node.name not in untracked and (requires_grad(written) or requires_grad(example(node)))
        if written is None or is_tracked or not shares_memory(tracked, written):
            continue
        names = [other for other in graph.nodes if _written(other) is None and shares_memory([written], example(other))]
        if len(names) == 1 or any(other.op == "placeholder" for other in names):
            writes[node.name] = written
    memory = [*writes.values()]
    views = [
        node.name for node in graph.nodes if node.name in untracked and memory and shares_memory(memory, example(node))
    ]
    return frozenset([*writes, *views])


def writes_to_inputs(graph: Graph, is_kept: Callable[[Node], bool] = lambda node: True) -> frozenset[str]:
    """Names of the nodes that write, with a gradient, to memory of the inputs of their piece, and of the views of it.

    Such as ``x /= 2`` of an argument, or of what an earlier piece made. Thunder leaves the input the gradient that it
    had before the write.

    Args:
        is_kept: whether Thunder traces a node. A piece is what follows each other and is kept, or is not.
    """
    untracked = without_gradient(graph)
    writes = [(node, _written(node)) for node in graph.nodes if node.name not in untracked]
    tracked = [(node, written) for node, written in writes if written is not None and requires_grad(written)]
    if not tracked:
        return frozenset()
    calls = [node for node in graph.nodes if node.op.startswith("call")]
    pieces = [[*piece] for _, piece in groupby(calls, is_kept)]
    first = {node: piece[0] for piece in pieces for node in piece}
    memory = [w for node, w in tracked if shares_memory([example(other) for other in _before(first[node])], w)]
    if not memory:
        return frozenset()
    named = (node for node in calls if shares_memory(memory, [example(node), example(written_by(node))]))
    return frozenset(node.name for node in named if shares_memory(example(node.all_input_nodes), memory))


def _before(node: Node) -> Iterator[Node]:
    """The nodes that come before one, and the inputs of the graph, which may come later."""
    inputs = (each for each in node.graph.nodes if not each.op.startswith("call"))
    return chain(inputs, takewhile(lambda each: each is not node, node.graph.nodes))


def views_and_writes(graph: Graph) -> frozenset[str]:
    """Names of the nodes that write, with a gradient, to memory of which another view is read later, and of such views.

    Such as ``v = y[0]`` and ``y.mul_(2)``. Thunder gives ``v`` the gradient that it had before the write.
    """
    untracked = without_gradient(graph)
    nodes = [*graph.nodes]
    names: set[str] = set()
    for i, node in enumerate(nodes):
        written = _written(node)
        if written is None or not has_storage(written) or not written.requires_grad or node.name in untracked:
            continue
        others = [each for each in nodes[:i] if _is_other_view(each, written)]
        base = autograd_base(written)
        whole = [each for each in nodes[:i] if base is not None and example(each) is base]
        later = {*nodes[i + 1 :]}
        if any(not later.isdisjoint(each.users) for each in [*others, *whole]):
            names.update(each.name for each in [*others, node])
    return frozenset(names)


def _is_other_view(node: Node, written: Tensor) -> bool:
    """Whether a node makes another view of the memory of what is written."""
    value = example(node)
    is_call = node.op.startswith("call") and value is not written and not _is_new_name(node)
    return is_call and shares_memory(example(node.all_input_nodes), value) and shares_memory([written], value)


def _is_new_name(node: Node) -> bool:
    """Whether a node returns its argument, of which nothing reads the old name later, as ``y.contiguous()`` may do."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, Node) or example(source) is not example(node):
        return False
    nodes = [*node.graph.nodes]
    return source.users.keys().isdisjoint(nodes[nodes.index(node) + 1 :])


def _written(node: Node) -> Tensor | None:
    """The tensor that a node writes in place, if it does."""
    return next(iter(tensors_in(example(written_by(node)))), None)


def requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def order_counts(graph: Graph) -> bool:
    """Whether a write in place could be moved before a read of the old values, or behind the graph's end, or a random
    draw before another one.

    Thunder's fusions by data flow, the default of ``thunderfx``, keep the order of what makes a value and what uses it,
    and no other: a write waits for nothing but what it computes with, and nothing waits for a write that is not used.
    """
    nodes = [*graph.nodes]
    if any(map(replaces_memory, nodes)) or _draws_could_swap(nodes):
        return True
    memory = {node: {storage_id(t) for t in tensors_in(example(node)) if has_storage(t)} for node in nodes}
    reads: list[set[Any]] = [set().union(*(memory[each] for each in node.all_input_nodes)) for node in nodes]
    for i, node in enumerate(nodes):
        for written in filter(has_storage, tensors_in(example(written_by(node)))):
            made_of = ancestors(node)
            before = [reads[j] for j in range(i) if nodes[j] not in made_of]
            after = [reads[j] for j in range(i + 1, len(nodes)) if nodes[j].op != "output"]
            is_used = any(storage_id(written) in each for each in after)
            computes = any(each.op.startswith("call") for each in made_of)
            if any(storage_id(written) in each for each in before) or (computes and not is_used):
                return True
    return False


def _draws_could_swap(nodes: list[Node]) -> bool:
    """Whether a draw waits for what something else computes, so that one after it could be made before it."""
    drawn = [node for node in nodes if _draws(node)]
    waits = (node for node in drawn if _WAIT_FOR_NOTHING.isdisjoint((called_function(node), operator_name(node))))
    return len(drawn) > 1 and any(waits)


def _draws(node: Node) -> bool:
    name = operator_name(node)
    return name == "gumbel_softmax" or draws(node.target) or draws(name)  # PyTorch has no operator of the first name


def ancestors(node: Node) -> set[Node]:
    """The nodes that a node is computed from."""
    above: set[Node] = set()
    waiting = [*node.all_input_nodes]
    while waiting:
        if (each := waiting.pop()) not in above:
            above.add(each)
            waiting += each.all_input_nodes
    return above
