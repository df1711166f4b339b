"""Where a graph of Dynamo's calls a symbol of this package's, since Thunder has none or one that is not PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from thunder_cg.analysis.sources import called_from, user_frames
from thunder_cg.compat.distributed import has_gradient
from thunder_cg.compat.fx import called_function, depends_on_autocast, example, is_unused, is_wait, operator_name
from thunder_cg.compat.operators import library_name
from thunder_cg.compat.splitter import can_trace, is_supported
from thunder_cg.compat.tensors import tensors_in, tree_leaves
from thunder_cg.compat.thunder import LOST_GRADIENT
from thunder_cg.dynamo import operators
from thunder_cg.dynamo.fallbacks import has_another_derivative, returns_cpu_scalar
from thunder_cg.dynamo.nodes import argument, arguments, call_before, call_instead, result_of, return_first_alone
from thunder_cg.dynamo.writes import is_returned, requires_grad
from thunder_cg.errors import CollectiveError

# They make new memory, of which Thunder makes views, as for ``x.repeat(2, 1, 1)``.
_VIEWED = frozenset({"flip", "repeat", "repeat_interleave"})


def use_own_operator(node: Node, options: dict[str, Any]) -> None:
    """Has a node call this package's operator, if that is better than what Thunder has."""
    if node.target is F.scaled_dot_product_attention:
        tensors = ("query", "key", "value", "attn_mask")
        given = arguments(node, *tensors, "dropout_p", "is_causal")
        node.args = tuple(given.pop(name, None) for name in tensors)  # no keyword of Thunder's may have a gradient
        node.kwargs = given
        _make_mask_contiguous(node)
        if not _is_more_than_symbol(node):
            return
        if given.get("dropout_p", 0.0) != 0.0:
            node.target = operators.attention  # the backward of PyTorch's operator would draw again
            return
    if node.target in (F.cross_entropy, F.nll_loss) and _is_right_loss(node):
        return
    if any(map(requires_grad, tree_leaves([arg for arg in example(node.args) if isinstance(arg, (list, tuple))]))):
        _pass_each_of_list(node, options)
        return
    function = called_function(node)
    if operator_name(node) in ("mul", "multiply"):
        if not (requires_grad(example(node)) and has_another_derivative(node)):
            return
        function = torch.mul
    if operator_name(node) == "repeat_interleave" and not isinstance(argument(node, 1, "repeats"), int):
        return  # a tensor, which is read on the host
    is_partial = operators.is_partial(function)
    if is_partial and is_supported(node, options) and not (operator_name(node) in _VIEWED and is_returned(node)):
        return
    if (is_partial or library_name(function)) and returns_cpu_scalar(node):
        return
    own = operators.instead_of(function)
    if own is not None and not depends_on_autocast(node, function) and can_trace(own, node, options):
        call_instead(node, own, *node.args, **node.kwargs)


def _pass_each_of_list(node: Node, options: dict[str, Any]) -> None:
    """``torch.hstack([x, y])`` takes ``x`` and ``y`` by themselves: Thunder's fallback for it loses their gradients."""
    function: Any = node.target
    args, own = node.args, operators.of_list(function) if node.op == "call_function" else None
    if own is None or node.kwargs or depends_on_autocast(node, function):
        return
    node.target, node.args = own, (*tree_leaves(args),)
    if not can_trace(own, node, options):
        node.target, node.args = function, args


def wait_in_trace(collective: Node, options: dict[str, Any]) -> None:
    """Thunder traces the collective and its wait in one, and `analysis/collectives.py` takes them apart."""
    own = operators.collective(collective.target)
    tensor, *others = collective.args
    if own is None or is_unused(collective) or collective.kwargs or collective.all_input_nodes != [tensor]:
        return
    if can_trace(lambda x, *numbers: own(x, *others), collective, options):  # the splitter has proxies for numbers
        collective.target = own
        while wait := next(filter(is_wait, collective.users), None):
            wait.replace_all_uses_with(collective)
            collective.graph.erase_node(wait)
    elif requires_grad(example(collective)) and not has_gradient(collective.target):  # Inductor would lose it silently
        where = called_from(user_frames(collective.stack_trace)) or "a line unknown to Dynamo"
        raise CollectiveError(f"{operator_name(collective)} at {where}", *LOST_GRADIENT)


def _is_right_loss(node: Node) -> bool:
    """Whether Thunder's loss of classes is: its mean of smoothed losses counts what is ignored, and some of its
    gradients raise. Its `nll_loss` takes fewer arguments, and has no right default of ``ignore_index``."""
    is_whole = node.target is F.cross_entropy or (len(node.args) <= 3 and "ignore_index" in node.kwargs)
    is_sum = node.kwargs.get("reduction", "mean") == "sum"
    return is_whole and not is_sum and not node.kwargs.get("label_smoothing") and example(node.args[0]).dim() in (2, 4)


def _is_more_than_symbol(attention: Node) -> bool:
    """Whether Thunder's symbol for attention, whose kernels are better in training, gets it wrong.

    It takes no ``enable_gqa``. Where no fused kernel is for it, it is written out, and NaN for what a mask keeps from
    attending to anything, as the padding on the left: on the CPU, and where rows of heads are not aligned to 16 bytes.
    """
    query, _, value = (example(each) for each in attention.args[:3])
    is_aligned = all(each.shape[-1] * each.element_size() % 16 == 0 for each in (query, value))
    is_written_out = query.device.type == "cpu" or query.dtype is torch.float64 or not is_aligned
    return "enable_gqa" in attention.kwargs or (attention.args[3] is not None and is_written_out)


def _make_mask_contiguous(attention: Node) -> None:
    """Copies a mask whose last dimension is not contiguous: PyTorch would choose another kernel, Thunder's raises."""
    query, key, value, mask = attention.args
    if not isinstance(mask, Node) or example(mask).device.type == "cpu" or example(mask).stride()[-1:] in ((), (1,)):
        return
    result = result_of(torch.Tensor.contiguous, (mask,))
    attention.args = (query, key, value, call_before(attention, torch.Tensor.contiguous, (mask,), result=result))


def trace_multi_head_attention(node: Node) -> None:
    """Thunder traces the function. Without the weights, it returns the output alone: the splitter wants no None.

    Weights in float32 beside another output come from autocast on CUDA, which Thunder does not see inside.
    """
    values = example(node)
    is_cast_inside = len({value.dtype for value in tensors_in([values])}) > 1
    if is_cast_inside and any(item.args[1] == 1 and item.users for item in node.users):
        return
    if not isinstance(values, tuple) or values[1] is not None:
        node.target = operators.multi_head_attention()
        return
    node.target = operators.multi_head_attention(output_only=True)
    return_first_alone(node)
