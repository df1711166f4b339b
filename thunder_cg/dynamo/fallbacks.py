"""What is left to Inductor, and why: mostly operators that Thunder only calls as they are, its fallbacks.

Note [Fallbacks that Thunder traces wrongly]
    The backward of a fallback runs the operator again, under autograd, so one that draws would draw other numbers.
    Tensors in a list get no gradient. What a fallback writes is unknown to the trace. It runs without autocast. A few
    others were found by comparing all fallbacks with PyTorch, values and gradients: tests/dynamo/test_fallbacks.py.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from thunder_cg.analysis import rules
from thunder_cg.analysis.advice import NUMBER_OF_DYNAMO
from thunder_cg.analysis.rules import Reason
from thunder_cg.compat.fx import (
    GET_DATA,
    checkpoints,
    depends_on_autocast,
    example,
    inside_transforms,
    is_collective,
    is_of_array,
    is_of_transform,
    is_unused,
    numpy_name,
    operator_name,
    reads_values,
    trains_on_dtensors,
    without_gradient,
)
from thunder_cg.compat.splitter import fallback_of, is_for_splitter, is_traced, loses_wait
from thunder_cg.compat.tensors import has_storage, is_cpu_scalar, is_wrapper, shares_storage, tensors_in, tree_leaves
from thunder_cg.compat.thunder import is_known_view, symbols_of_functions
from thunder_cg.dynamo.layouts import layout_counts, reads_by_strides
from thunder_cg.dynamo.nodes import argument
from thunder_cg.dynamo.writes import (
    is_named_in_place,
    is_returned_beside_another,
    requires_grad,
    shares_memory,
    untracked_writes,
    views_and_writes,
    writes_to_inputs,
    written_by,
)
from thunder_cg.errors import SkipReason

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# Their gradients, or which results have one, are not PyTorch's.
_WRONG = frozenset({"lu", "lu_unpack", "native_layer_norm", "norm"})

# Views of PyTorch's of which a trace has copies. What PyTorch runs as it is, as ``y.detach()``, it returns as a view.
_COPIED = frozenset({"diagonal", "unfold"})

# What changes it.
_OUT_OF_PLACE = "compute a new tensor, as x = x * 2 for x.mul_(2)"
_NO_TRANSFORM = "write it without the transform, as x.sum(-1) for torch.vmap(torch.sum)(x)"
_FEW_KERNELS = "nothing has to change: the layer is a few large kernels, which no fusion makes faster"
_OF_PYTORCH = "call PyTorch's function of that name, or index a tensor, which is made of the array once, outside"
_SCALAR = "[]"  # a shape, as text: sizes may be symbols, and to compare those would make guards
_WITH_DIMENSION = "give it a dimension, as with keepdim=True, or use a GPU"
_OTHERS = "use other operators, or call it outside of the compiled function"
_REAL = "compute with the real and the imaginary part as two tensors"
_THUNDERS_PARALLELISM = "take column_parallel and row_parallel of thunder.distributed, with thunder.jit"
_INDEX = "take torch.where, x.scatter(dim, index, source) or x.index_copy(dim, index, source)"
_DRAWS_OTHERS = SkipReason(
    "draws with PyTorch's generator under Dynamo, and so other numbers than NumPy would",
    "with torch._dynamo.config.use_numpy_random_stream = True, the graph ends there and NumPy draws",
)


def objections(module: GraphModule, options: dict[str, Any]) -> Callable[[Node], SkipReason | None]:
    """Says of a node of a graph why it is left to Inductor, to be read after its name; None if Thunder traces it.

    Args:
        module: the graph, with those of functions that it calls, such as checkpointed ones.
        options: those of ``thunder.jit`` that the graph is to be compiled with.
    """
    modules = [each for each in module.modules() if isinstance(each, GraphModule)]
    of_graph = {each.graph: _objections(each.graph, options) for each in modules}
    checkpointed = {module.get_submodule(str(call.args[0])).graph for call in checkpoints(module.graph)}

    def objection(node: Node) -> SkipReason | None:
        if node.graph in checkpointed and written_by(node):
            problem = "writes in place in a checkpointed function, and Thunder does not see who reads it there"
            return SkipReason(problem, _OUT_OF_PLACE)
        if node.graph in checkpointed and node.target is torch.ops.higher_order.autograd_function_apply:
            problem = "is a torch.autograd.Function in a checkpointed function, and Thunder traces others only"
            return SkipReason(problem, "call it outside of the checkpointed function")
        return next((found for each in _with_results(node) if (found := of_graph[node.graph](each)) is not None), None)

    return objection


def _with_results(node: Node) -> Iterator[Node]:
    """The node, and with one that returns several tensors those that take them apart: a piece returns tensors alone."""
    yield node
    maker: Any = node.args[0] if node.target is operator.getitem else node
    if isinstance(maker, Node) and isinstance(example(maker), (list, tuple)):
        yield maker
        yield from (user for user in maker.users if user.target is operator.getitem)


def _objections(graph: Graph, options: dict[str, Any]) -> Callable[[Node], SkipReason | None]:
    transformed = inside_transforms(graph)
    lost_views = [example(node) for node in _views_lost(graph)]
    lost, untracked = untracked_writes(graph), without_gradient(graph)
    viewed, with_dtensors = views_and_writes(graph), trains_on_dtensors(graph)
    is_given = _writes_across_pieces(graph, options)

    def objection(node: Node) -> SkipReason | None:
        if node.name in transformed or is_of_transform(node):
            return SkipReason(
                "is inside of torch.vmap or another transform of torch.func, which Thunder does not see", _NO_TRANSFORM
            )
        if (reason := _objection_to_node(node, options)) is not None:
            return reason
        if with_dtensors and any(map(is_wrapper, tensors_in((example(node), example(node.args))))):
            return SkipReason("works on DTensors, of which Thunder knows no gradient", _THUNDERS_PARALLELISM)
        if node.name in lost:
            problem = "writes in place, without a gradient, to a tensor that has one, which Thunder loses"
            return SkipReason(problem, _OUT_OF_PLACE)
        if is_given(node):
            return SkipReason(
                "writes in place to an argument or to what another piece made, or makes a view of it, whose gradient "
                "Thunder loses",
                _OUT_OF_PLACE,
            )
        if node.name in viewed:
            return SkipReason(
                "writes to memory of which a view is read later, or makes that view, whose gradient Thunder loses",
                _OUT_OF_PLACE,
            )
        is_tracked = requires_grad(result := example(node)) and node.name not in untracked
        if is_tracked and node.op.startswith("call"):
            if has_another_derivative(node):
                is_index = operator_name(node).rstrip("_") == "index_put"
                return SkipReason("gets other gradients from Thunder than from PyTorch", _INDEX if is_index else _REAL)
            if is_named_in_place(node) and _writes_view(node, result):
                return SkipReason("writes in place through a view, whose gradient Thunder loses", _OUT_OF_PLACE)
        if _is_unsummed(node, is_tracked=is_tracked):
            return SkipReason("returns a 0-dim tensor on the CPU, whose gradient Thunder does not sum", _WITH_DIMENSION)
        if node.name not in untracked and _meets_other_gradients(node):
            problem = "combines a 0-dim tensor on the CPU with a larger one, and Thunder adds its gradient to others"
            return SkipReason(problem, _WITH_DIMENSION)
        function = fallback_of(node)
        if _may_copy(node) and shares_memory(lost_views, result):
            return SkipReason(
                "returns a view of what is written in place, or returned beside it, and Thunder may return a copy",
                _OUT_OF_PLACE,
            )
        if shares_memory(lost_views, example(written_by(node))):
            return SkipReason(
                "writes in place to memory of which another operator, that Inductor gets, returns a view", _OUT_OF_PLACE
            )
        return objection_to_fallback(node, function) if function is not None else None

    return objection


def _objection_to_node(node: Node, options: dict[str, Any]) -> SkipReason | None:
    """Why a node is left to Inductor, whatever else there is in the graph."""
    if node.target is torch.ops.higher_order.autograd_function_apply and "args_tensor_mask" not in node.kwargs:
        problem = "is a torch.autograd.Function, which Thunder knows only as older releases of PyTorch wrote it"
        return SkipReason(problem, _OTHERS)
    if is_collective(node) and is_unused(node):
        return SkipReason(
            "communicates for other ranks alone, and Thunder would drop it, as nothing here uses the result"
        )
    if loses_wait(node, options):
        return SkipReason("waits for a collective that Thunder does not trace, and Thunder would not wait")
    if node.op == "call_method" and node.target == "unfold":
        problem = "is a method that Thunder takes for torch.nn.functional.unfold, which is another function"
        same = "x[..., torch.arange(n)[:, None] * step + torch.arange(size)] is x.unfold(-1, size, step)"
        return SkipReason(problem, same)
    if node.target is GET_DATA:
        problem = "is written or returned, or beside a 0-dim tensor on the CPU, and Thunder does not trace it"
        return SkipReason(problem, "take x.detach() for x.data, and write to x under torch.no_grad()")
    if node.target is F.embedding and argument(node, 3, "max_norm") is not None:
        fix = "leave it out, and write before the call: weight.data.copy_(weight.renorm(2, 0, max_norm))"
        return SkipReason("has max_norm=, with which it writes to the weight", fix)
    if reads_by_strides(node) and layout_counts(node):
        problem = "reads memory by strides that Thunder may not keep, and the memory is written or returned"
        return SkipReason(problem, _OTHERS)
    if node.target is operator.getitem and requires_grad(example(node)) and _has_list(node.args[1]):
        problem = "has a list in its index, which is copied to the device in each call"
        return SkipReason(problem, "make it a tensor once, outside")
    if (name := numpy_name(node)) == "numpy.item":
        problem = "reads a number of NumPy's, or a size, from a tensor, as which Dynamo passes it"
        return SkipReason(problem, "pass a number of Python's, as int(n) makes one")
    if name is not None:
        if name.startswith("numpy.random."):
            return _DRAWS_OTHERS
        return SkipReason("is NumPy's, which Dynamo has PyTorch compute", _OF_PYTORCH)
    if is_of_array(node):
        problem = "makes a tensor of an array of NumPy's in each call, which Thunder does not trace"
        return SkipReason(problem, "make the array a tensor or a buffer once, outside of what is compiled")
    if operator_name(node) == "_assert_async":
        problem = "is an assert on what a tensor holds, which Thunder does not trace"
        return SkipReason(problem, "check before or after the call")
    if is_unknown(node.target):
        return SkipReason("didn't have any mapping in thunder")
    return None


def _writes_across_pieces(graph: Graph, options: dict[str, Any]) -> Callable[[Node], bool]:
    """Says of a node whether it writes to what its piece gets. What Inductor gets because of that cuts more pieces."""
    given: set[str] | None = None

    def is_given(node: Node) -> bool:
        nonlocal given
        if given is None:  # the splitter asks by now, and is asked about all nodes
            given = set()
            while more := writes_to_inputs(graph, lambda each: is_traced(each, options)) - given:
                given |= more
        return node.name in given

    return is_given


def _has_list(index: Any) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


def is_unknown(function: Any) -> bool:
    """Whether it is a function of PyTorch's without a symbol, which Thunder's splitter takes for one of Python's.

    The splitter calls it, which works for one that takes no tensors.
    """
    return inspect.isbuiltin(function) and function.__module__ == "torch" and function not in symbols_of_functions()


def objection_to_fallback(node: Node, function: Callable[..., Any]) -> SkipReason | None:
    """Why a call of a fallback is left to Inductor; None if Thunder traces it right."""
    args = example(node.args)
    leaves = tree_leaves((args, example(node.kwargs)))
    if any(isinstance(leaf, torch.SymFloat) for leaf in leaves):
        return NUMBER_OF_DYNAMO
    with_gradient = any(map(requires_grad, leaves))
    if (reason := objection_to_operator(function, with_gradient=with_gradient)) is not None:
        return reason
    if any(requires_grad(leaf) for arg in args if isinstance(arg, (list, tuple)) for leaf in tree_leaves(arg)):
        return SkipReason("takes a list of tensors, whose gradients Thunder's fallback for it loses", _OTHERS)
    if returns_cpu_scalar(node):
        problem = "returns a 0-dim tensor on the CPU, whose gradient Thunder does not sum and its fallback refuses"
        return SkipReason(problem, _WITH_DIMENSION)
    if reads_values(node, function):  # as istft
        problem = "checks on the host what a tensor holds, which Thunder has no value of while it traces"
        return SkipReason(problem, _OTHERS)
    if depends_on_autocast(node, function):
        problem = "computes in another dtype under autocast, which Thunder's fallback for it does not see"
        return SkipReason(problem, "call it under torch.autocast(device_type, enabled=False), and cast its arguments")
    return None


def objection_to_operator(function: Callable[..., Any], *, with_gradient: bool) -> SkipReason | None:
    """Why all calls of a fallback are left to Inductor, or all where a gradient is wanted."""
    id_ = symbols_of_functions()[function].id
    rule = rules.find(None, id_)
    if rule is None or rule.cause.reason is Reason.SIDE_EFFECT or rule.writes:
        problem = "may write its inputs or other state, of which Thunder's fallback for it says nothing"
        return SkipReason(problem, _OTHERS)
    if with_gradient and id_.rsplit(".", 1)[-1] in _WRONG:
        return SkipReason("gets other gradients from Thunder's fallback for it than from PyTorch", _OTHERS)
    if with_gradient and rule.draws:
        is_recurrent = id_.rsplit(".", 1)[-1] in _RECURRENT
        fix = _FEW_KERNELS if is_recurrent else "draw with torch.rand_like, and compute with that"
        return SkipReason("may draw, and Thunder's fallback for it would draw again in its backward", fix)
    return None


def has_another_derivative(node: Node) -> bool:
    """Whether Thunder differentiates an operator otherwise: see Note [Other derivatives] in analysis/gradients.py.

    Of complex numbers in a list, Thunder's operators only make one tensor, which is linear.
    """
    if operator_name(node).rstrip("_") == "index_put":
        return True
    is_thunders = fallback_of(node) is None and not is_for_splitter(node.target)
    is_complex = any(tensor.is_complex() for tensor in tensors_in((example(node.args), example(node))))
    return is_thunders and is_complex and not isinstance([*node.args, None][0], (list, tuple))


def _views_lost(graph: Graph) -> Iterator[Node]:
    """Operators that return views of memory that is written later, in the graph or by who gets it, and of which Thunder
    makes copies, or does not know them as views by then.

    It knows some of them, but none that it has differentiated. ``x.data`` is one that only Inductor gets.
    """
    trains = any(requires_grad(leaf) for node in graph.nodes for leaf in tree_leaves(example(node)))
    written: list[Any] = []
    for node in reversed(graph.nodes):
        function = fallback_of(node)
        is_lost = _may_copy(node) if trains else function is not None and not is_known_view(function)
        if is_lost or node.target is GET_DATA:
            result = example(node)
            is_view = shares_memory(example(node.all_input_nodes), result)
            is_copied = operator_name(node) in _COPIED and is_returned_beside_another(node)
            if is_view and (is_copied or shares_memory(written, result)):
                yield node
        written += map(example, written_by(node))


def _may_copy(node: Node) -> bool:
    """Whether Thunder may make a copy where PyTorch makes a view, as it writes ``diagonal`` with a gradient."""
    return fallback_of(node) is not None or (operator_name(node) == "diagonal" and requires_grad(example(node)))


def _is_unsummed(node: Node, *, is_tracked: bool) -> bool:
    """Whether it makes a 0-dim tensor on the CPU that is combined with a larger one, and for which Thunder computes a
    gradient, which it also does for what comes from `detach`: see Note [Gradients of CPU scalars] in
    analysis/gradients.py."""
    result = example(node)
    if not is_cpu_scalar(result):
        return False
    if not any(tensor.dim() for user in node.users for tensor in tensors_in([example(user)])):
        return False
    makers, seen = [node], set()
    while makers and node.op.startswith("call"):
        maker = makers.pop()
        if is_tracked or (operator_name(maker) == "detach" and requires_grad(example(maker.args[0]))):
            return True
        seen.add(maker)
        makers += (each for each in maker.all_input_nodes if each not in seen and each.op.startswith("call"))
    return False


def _meets_other_gradients(node: Node) -> bool:
    """Whether a node combines a 0-dim tensor on the CPU with a larger one, and that has gradients of other shapes from
    elsewhere: see Note [Gradients of CPU scalars] in analysis/gradients.py."""
    scalars = [each for each in node.all_input_nodes if is_cpu_scalar(example(each)) and requires_grad(example(each))]
    shape = _gradient_shape(node) if scalars else None
    is_larger = shape not in (None, _SCALAR)
    return is_larger and any({*map(_gradient_shape, scalar.users)} - {shape, None} for scalar in scalars)


def _gradient_shape(user: Node) -> str | None:
    """The shape of the gradient that a 0-dim tensor gets from one of its users; None if it gets none."""
    is_combined = any(tensor.dim() for tensor in tensors_in(example(user.all_input_nodes)))
    is_summed = user.target is operator.setitem or is_for_splitter(user.target)  # in PyTorch's backward of a symbol
    if user.op == "output" or is_summed or not is_combined:
        return _SCALAR
    return next((str([*each.shape]) for each in tensors_in([example(user)]) if requires_grad(each)), None)


def returns_cpu_scalar(node: Node) -> bool:
    """Whether a node returns a 0-dim tensor on the CPU that has a gradient, or `detach` of one, for which Thunder's
    fallback computes one: see Note [Gradients of CPU scalars] in analysis/gradients.py."""
    of_detach = example(node.args[:1]) if operator_name(node) == "detach" else ()
    return any(requires_grad(leaf) and is_cpu_scalar(leaf) for leaf in tree_leaves((example(node), of_detach)))


def _writes_view(node: Node, result: torch.Tensor) -> bool:
    """Whether an operator in place has written to a view of another tensor of the graph."""
    written = node.args[0]
    sources = written.all_input_nodes if isinstance(written, Node) else []
    while same := [source for source in sources if example(source) is result]:  # what an operator in place returns
        sources = same[0].all_input_nodes
    return has_storage(result) and shares_storage(example(sources), result)
