"""Which hooks on gradients would see others than in PyTorch: see Note [Hooks that Dynamo moves] in compat."""

from __future__ import annotations

from itertools import dropwhile
from typing import Any

from thunder_cg.compat.dynamo_hooks import Hook
from thunder_cg.compat.fx import example
from thunder_cg.dynamo.writes import shares_memory, written_by


def is_moved(hook: Hook) -> bool:
    """Whether the place where Dynamo puts a hook counts, in the graph as it is by now."""
    tensor, result, ends_graph = hook
    nodes = [*tensor.graph.nodes]
    names = [node for node in nodes if example(node) is example(tensor)]
    if ends_graph:  # what only writes to the tensor is no other result
        users = {user for name in names for user in name.users} - {tensor}
        return any(user.users or not written_by(user) for user in users)
    if result is None:
        return _write([example(tensor)], nodes)
    apply: Any = result.args[0]
    after = [*dropwhile(lambda node: node is not result, nodes)][1:]
    users = {user for name in names if name not in after for user in name.users}
    # The hook reads tensors, too, which are arguments of the autograd function.
    return not users.isdisjoint(after) or _write([*map(example, apply.all_input_nodes)], after)


def _write(tensors: Any, nodes: Any) -> bool:
    """Whether nodes write to memory of tensors."""
    return any(shares_memory(tensors, example(written_by(node))) for node in nodes)
