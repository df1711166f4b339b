"""Private names of autograd: the backward under way, its nodes, and hooks."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from thunder_cg.compat.settings import without_torch_functions

# Whether the backward under way runs this node. RuntimeError for a leaf among the inputs of `torch.autograd.grad`.
engine_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


def in_backward() -> bool:
    """Whether a backward is under way on this thread."""
    return torch._C._current_graph_task_id() != -1


# The inputs of a backward that runs nothing.
_nothing = torch.zeros((), device="cpu", requires_grad=True), torch.zeros((), device="cpu")


def drop_failed_backwards() -> None:
    """Frees what backwards of this thread that raised have left in its queue: nodes, and the gradients for them.

    Autograd does so when the next backward begins, which is after the next forward.
    """
    if not in_backward():
        leaf, gradient = _nothing
        with without_torch_functions():
            torch.autograd.grad(leaf, leaf, gradient)


def backward_keeps_graph() -> bool:
    """Whether a backward is under way on this thread that keeps its graph for another one."""
    return in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def function_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` calls where no transform of torch.func is active, without the check whether one is."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def raising_if_differentiated(
    gradients: Sequence[torch.Tensor | None], message: str
) -> tuple[torch.Tensor | None, ...]:
    """The same gradients, with a node of autograd that raises RuntimeError in a backward through them."""
    leaves = [each if each is None else each.detach().requires_grad_() for each in gradients]
    results = torch._C._functions.DelayedError(message.encode(), len(leaves))(*leaves)  # type: ignore[arg-type]
    return results if isinstance(results, tuple) else (results,)


def has_accumulate_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks wait for the gradient of the leaf, or for its accumulation."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


_own_hooks = 0  # how many hooks of this package have been registered


def registered_hooks() -> int:
    """How many hooks others than this package have registered from Python so far, in this process."""
    return RemovableHandle.next_id - _own_hooks


def register_own(register: Callable[[Callable[..., Any]], RemovableHandle], hook: Callable[..., Any]) -> Any:
    """Registers a hook of this package, so that those of others are counted right."""
    global _own_hooks
    _own_hooks += 1
    return register(hook)


def hooks_of(value: Any) -> Iterator[Callable[..., Any]]:
    """The hooks of a module, an optimizer or a tensor that run when it is used, or when it gets its gradient."""
    for name in _HOOKS:
        yield from (getattr(value, name, None) or {}).values()
    if isinstance(value, torch.Tensor) and value.requires_grad and registered_hooks():
        yield from _hooks_of_gradient(value)


def _hooks_of_gradient(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    if not is_leaf(tensor) or is_lazy(tensor):
        return []
    with torch.inference_mode(False):  # which gives no tensor a node
        return hooks_of_node(gradient_node(tensor))


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd accumulates a gradient of a tensor, if the tensor requires one."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that autograd refuses to describe, as those of FSDP's flat parameters
        return False


def gradient_node(leaf: torch.Tensor) -> Any:
    """The node that accumulates the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


# What runs a backward, and has what it begins at in a variable.
CODE_OF_BACKWARD: types.CodeType = torch.autograd.graph._engine_run_backward.__code__


def leaves_of_backward(frame: types.FrameType) -> list[torch.Tensor]:
    """The leaves that the backward of a frame of `CODE_OF_BACKWARD` may reach."""
    roots = frame.f_locals["t_outputs"]
    nodes: list[Any] = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    leaves = [root for root in roots if isinstance(root, torch.Tensor) and root.requires_grad and is_leaf(root)]
    seen = set(filter(None, nodes))
    nodes = [*seen]
    for node in nodes:  # which grows
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        nodes += new
    return leaves


def hooks_of_node(node: Any) -> list[Callable[..., Any]]:
    """The hooks of a node of autograd. PyTorch does not say them: one of ours, which is removed again, shows others."""
    hooks: list[Callable[..., Any]] = []
    for register in (node.register_prehook, node.register_hook):
        handle = register_own(register, lambda *gradients: None)
        others = dict(handle.hooks_dict_ref() or ())
        handle.remove()
        others.pop(handle.id, None)
        hooks += others.values()
    return hooks


@contextmanager
def before_backwards(tensors: Iterable[torch.Tensor], call: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, a backward that is about to run the node that made one of the tensors calls a function with the tensor.

    Args:
        tensors: with a history.
    """
    handles = []
    for each in tensors:
        handles.append(register_own(each.grad_fn.register_prehook, lambda *_, each=each: call(each)))  # type: ignore[union-attr]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def global_hooks() -> list[tuple[str, Mapping[Any, Any]]]:
    """The hooks of all modules and all optimizers, by what they are for."""
    modules = torch.nn.modules.module
    return [
        ("the forward of all modules", {**modules._global_forward_hooks, **modules._global_forward_pre_hooks}),
        ("the backward of all modules", {**modules._global_backward_hooks, **modules._global_backward_pre_hooks}),
        ("the step of all optimizers", {**_global_optimizer_pre_hooks, **_global_optimizer_post_hooks}),
    ]
