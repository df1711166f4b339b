"""Leaves functions to PyTorch whose hooks on gradients Dynamo would move. Checked with PyTorch 2.11 alone.

Note [Hooks that Dynamo moves]
    ``y.register_hook(hook)`` has the hook see the gradient of what ``y`` holds by then, whatever it is read by. If the
    graph makes ``y``, Dynamo writes an autograd function that calls the hook where ``y`` is made. That is before all
    that was written to ``y`` since, and after hooks that were registered before, so that it runs before them. What the
    hook reads, it computes there, too. What is ``y`` by another name is read without the hook. Under ``torch.no_grad``,
    the function has no gradient. The hook of an argument is registered after the graph, on what the graph has written.

    Where Dynamo does not trace a hook, it ends the graph, as for ``y.retain_grad()``. What was computed from ``y``
    before then adds nothing to the gradient that the hook sees.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._guards import TracingContext
from torch.fx import Node

from thunder_cg.compat.dynamo_records import DynamoBreak

_register_hook = TensorVariable._method_register_hook
_retain_grad = TensorVariable.method_attr_retain_grad
_compile_subgraph = OutputGraph.compile_subgraph
_HOOKS = "thunder_cg_hooks"  # of a graph of Dynamo's, with the lines that register them
MOVED = """A hook on a gradient, which Dynamo would put at another place, where it sees another gradient
  Explanation: Dynamo puts it where the tensor is made, where the graph ends, or before an earlier hook.
  Hint: register one hook where the tensor is made, before anything is computed from it or written to it, or on a copy \
that is used from then on: y = y.clone()"""


class Hook(NamedTuple):
    """A hook on a gradient in a graph of Dynamo's.

    Attributes:
        tensor: what it is registered on.
        result: the tensor after the hook; None for an argument, whose hook is registered after the graph.
        ends_graph: whether the graph ends here, as Dynamo does not trace the hook.
    """

    tensor: Node
    result: Node | None = None
    ends_graph: bool = False


def leaving_moved_hooks(is_moved: Callable[[Hook], bool], left: list[DynamoBreak]) -> AbstractContextManager[Any]:
    """Has Dynamo compile nothing of a function with hooks that it moves: see Note [Hooks that Dynamo moves].

    Args:
        is_moved: says so of a hook, by the graph up to where it ends.
        left: gets why and where, if it does.
    """

    def register_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, tensor = InstructionTranslator.current_tx().output, self.as_proxy().node
        hooks, lines = vars(output).setdefault(_HOOKS, []), TracingContext.extract_stack()
        is_second = any(tensor is hook.result for hook, _ in hooks)
        is_on_gradient = "register_hook" in args and torch.is_grad_enabled()  # PyTorch has the others on leaves alone
        if not self.source and (is_second or not is_on_gradient or tensor.graph is not output.graph):
            leave(lines)
        before = [node for node in tensor.graph.nodes if node.op.startswith("call")]
        handle = or_end_graph(self, lambda: _register_hook(self, *args, **kwargs))
        known = {*before}
        if [node for node in tensor.graph.nodes if node in known] != before:
            leave(lines)
        result = self.as_proxy().node
        if result is not tensor:  # an autograd function's view, to write to which raises while Dynamo traces
            made = tensor.meta["example_value"]
            result.meta["example_value"] = made.view_as(made)
        if self.source or result is not tensor:
            hooks.append((Hook(tensor, None if self.source else result), lines))
        return handle

    def retain_grad(self: Any, tx: Any) -> Any:
        return or_end_graph(self, lambda: _retain_grad(self, tx))

    def or_end_graph(variable: Any, register: Callable[[], Any]) -> Any:
        lines = TracingContext.extract_stack()
        try:
            return register()
        except Unsupported:
            if not variable.source and is_moved(Hook(variable.as_proxy().node, ends_graph=True)):
                leave(lines)
            raise

    def compile_subgraph(self: Any, *args: Any, **kwargs: Any) -> Any:
        for hook, lines in vars(self).get(_HOOKS, ()):
            if is_moved(hook):
                leave(lines)
        return _compile_subgraph(self, *args, **kwargs)

    def leave(lines: Any) -> NoReturn:
        left.append(DynamoBreak(MOVED, [*lines]))
        error = _Left(MOVED)
        error.real_stack = lines
        raise error from None

    stack = ExitStack()
    stack.enter_context(patch.object(TensorVariable, "_method_register_hook", register_hook))
    stack.enter_context(patch.object(TensorVariable, "method_attr_retain_grad", retain_grad))
    stack.enter_context(patch.object(OutputGraph, "compile_subgraph", compile_subgraph))
    return stack


class _Left(Unsupported):
    """Has Dynamo compile nothing of a function, nor of what calls it, if it traces that."""

    skip_frame = property(lambda self: True, lambda self, is_skipped: None)
