"""What a graph of Dynamo's writes in place, and where the order of writes and reads counts."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from thunder_cg.compat.dynamo import example, operator_name
from thunder_cg.compat.torch import has_storage, shares_storage, storage_id, tensors_in

# Operators of Python's that write to their first argument, and those that compute what they write.
IN_PLACE = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}


def written_by(node: Node) -> list[Any]:
    """What an operator writes in place, as arguments of its node."""
    name = operator_name(node)
    is_named = name.endswith("_") and not name.endswith("__")
    writes = (
        is_named or node.target in IN_PLACE or node.target is operator.setitem or node.kwargs.get("inplace") is True
    )
    return [*(node.args[:1] if writes else ()), *([node.kwargs["out"]] if "out" in node.kwargs else ())]


def shares_memory(values: Any, others: Any) -> bool:
    """Whether a tensor of one of the values shares memory with one of the others."""
    return any(has_storage(tensor) and shares_storage(values, tensor) for tensor in tensors_in(others))


def order_counts(graph: Graph) -> bool:
    """Whether a write in place could be moved before a read of the old values, or behind the graph's end.

    Thunder's fusions by data flow, the default of ``thunderfx``, keep the order of what makes a value and what uses it,
    and no other: a write waits for nothing but what it computes with, and nothing waits for a write that is not used.
    """
    nodes = [*graph.nodes]
    memory = {node: {storage_id(t) for t in tensors_in(example(node)) if has_storage(t)} for node in nodes}
    reads: list[set[Any]] = [set().union(*(memory[each] for each in node.all_input_nodes)) for node in nodes]
    for i, node in enumerate(nodes):
        for written in filter(has_storage, tensors_in(example(written_by(node)))):
            made_of = _ancestors(node)
            before = [reads[j] for j in range(i) if nodes[j] not in made_of]
            after = [reads[j] for j in range(i + 1, len(nodes)) if nodes[j].op != "output"]
            is_used = any(storage_id(written) in each for each in after)
            computes = any(each.op.startswith("call") for each in made_of)
            if any(storage_id(written) in each for each in before) or (computes and not is_used):
                return True
    return False


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [*node.all_input_nodes]
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return found
