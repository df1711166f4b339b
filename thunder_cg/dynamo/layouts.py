"""The layouts in memory that Dynamo saw, where they count.

A trace of Thunder's has no strides: what it computes may be laid out otherwise than by PyTorch, as ``zeros_like`` of a
transposed tensor is. Dynamo took PyTorch's strides for constants. What ``as_strided`` reads depends on them, and what
Inductor compiled refuses other ones. So values are laid out there as Dynamo saw them, which mostly copies nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from thunder_cg.analysis.sources import called_from, described, user_frames
from thunder_cg.compat.fx import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    example,
    inside_transforms,
    is_read_number,
    operator_name,
)
from thunder_cg.compat.settings import dispatch_mode_count
from thunder_cg.compat.tensors import has_storage, shares_storage, tensors_in
from thunder_cg.compat.torch_compile import InductorError
from thunder_cg.dynamo import operators
from thunder_cg.dynamo.nodes import call_before, call_instead, copied
from thunder_cg.dynamo.writes import replaces_memory, requires_grad, shares_memory, writes_to_inputs, written_by
from thunder_cg.errors import LayoutError

_logger = logging.getLogger(__name__)

# What makes a tensor with the strides of another one, which Thunder's do not keep.
LIKE = frozenset({
    torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like,
})  # fmt: skip


def make_as_laid_out(node: Node) -> None:
    """``torch.zeros_like(x)`` of a transposed ``x`` is ``torch.zeros_like(x.permute(...)).permute(...)``."""
    result, (tensor, *others), make = example(node), node.args or [None], node.target
    is_plain = isinstance(result, torch.Tensor) and has_storage(result) and not node.kwargs.keys() - {"dtype", "device"}
    if not (is_plain and isinstance(tensor, Node) and callable(make)):
        return
    strides = [stride if isinstance(stride, int) else stride.node.hint for stride in result.stride()]
    dims = sorted(range(len(strides)), key=lambda dim: (-(strides[dim] or 0), dim))
    if dims == sorted(dims) or None in strides:
        return
    source = call_before(node, torch.permute, (tensor, tuple(dims)), result=example(tensor).permute(dims))
    made = call_before(node, make, (source, *others), {**node.kwargs}, result=result.permute(dims))
    call_instead(node, torch.permute, made, tuple(map(dims.index, sorted(dims))))


def lay_out_before_strides(graph: Graph) -> None:
    """Has ``x.as_strided(...)`` read ``x`` in the layout that Dynamo saw, if a copy of ``x`` would do."""
    transformed = inside_transforms(graph)
    for node in [*graph.nodes]:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not reads_by_strides(node) or node.name in transformed:
            continue
        stride = fixed_stride(example(source))
        if stride is not None and source.op.startswith("call") and not layout_counts(node):
            laid_out = call_before(node, operators.laid_out(), (source, stride), result=example(source))
            node.replace_input_with(source, laid_out)


def reads_by_strides(node: Node) -> bool:
    return node.target in ("as_strided", torch.as_strided)


def layout_counts(node: Node) -> bool:
    """Whether more than values is known of the memory that a node reads: it is written later, or returned twice."""
    value = example(node)
    nodes = [*node.graph.nodes]
    written = [example(written_by(each)) for each in nodes[nodes.index(node) + 1 :]]
    returned = filter(has_storage, tensors_in(example(nodes[-1].args)))
    return shares_memory(written, value) or sum(shares_storage(value, each) for each in returned) > 1


def keeping_layouts(compile_piece: Callable[..., Any]) -> Callable[..., Any]:
    """``torch._inductor.compile`` of pieces that take values in the layouts that they were compiled for.

    Under a dispatch mode, they run operator by operator, and always if Inductor cannot compile them, if they give a
    tensor other memory, or if they write with a gradient to what they get, unless they read memory by strides.
    """

    def compiled_piece(piece: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        operators_of_piece = copied(piece)
        reads = any(map(reads_by_strides, piece.graph.nodes))
        # Autograd refuses much of what Inductor makes of writes, and Inductor loses other memory that an input gets.
        is_lost = any(is_refused_lstm(node) or replaces_memory(node) for node in piece.graph.nodes)
        if (writes_to_inputs(piece.graph) and not reads) or is_lost:
            return operators_of_piece
        try:
            compiled: Callable[..., Any] = compile_piece(piece, inputs, *args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # Inductor reads no tensor. Dynamo would give up the whole function, or Thunder would run the piece, which
            # Inductor has changed by then so that it returns a tuple.
            return operators_of_piece
        except AssertionError:  # Inductor (2.11) cannot differentiate some pieces that read a number from a tensor
            if not any(is_read_number(example(node)) for node in operators_of_piece.graph.nodes):
                raise
            return operators_of_piece
        except InductorError as error:
            lines = (called_from(user_frames(node.stack_trace)) for node in operators_of_piece.graph.nodes)
            where, raised = ", ".join(filter(None, dict.fromkeys(lines))), described(error.inner_exception)
            _logger.warning("%s: Inductor raised %s; the operators there run one by one", where, raised)
            return operators_of_piece
        *_, output = piece.graph.nodes
        kept = [example(output.args), *(example(written_by(node)) for node in piece.graph.nodes)]
        places = piece.graph.find_nodes(op="placeholder")
        shared = [place if shares_memory(kept, example(place)) else None for place in places]
        strides = [*map(fixed_stride, inputs)]

        def taken(value: Any, stride: tuple[int, ...] | None, place: Node | None) -> Any:
            laid_out = operators.in_layout(value, stride)
            if laid_out is not value and place is not None:
                frames = [user_frames(user.stack_trace) for user in place.users]
                raise LayoutError(called_from(next(filter(None, frames), [])), value.stride(), stride)
            return laid_out

        def call(*values: Any) -> Any:
            # A dispatch mode, such as the tape of a graphed step, does not see what Inductor's code does.
            run = operators_of_piece if dispatch_mode_count() else compiled
            return run(*map(taken, values, strides, shared))

        return call

    return compiled_piece


def is_refused_lstm(node: Node) -> bool:
    """Whether it is an LSTM that is trained on a CPU, and whose input has no gradient: Inductor's (2.11) raises."""
    if operator_name(node) != "lstm":
        return False
    trains = any(requires_grad(each) and each.device.type == "cpu" for each in tensors_in(example(node)))
    return trains and not requires_grad(example(node.args[0]))


def fixed_stride(value: Any) -> tuple[int, ...] | None:
    """The strides of a tensor of fixed sizes; None of anything else."""
    if not isinstance(value, torch.Tensor) or not has_storage(value):
        return None
    numbers = (*value.shape, *value.stride())
    return value.stride() if all(type(number) is int for number in numbers) else None
