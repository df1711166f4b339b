"""Names of FX graphs as Dynamo leaves them: examples of values, the modes of nodes, sizes, and what NumPy's became."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import NumpyTensorSource
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from thunder_cg.compat.tensors import tensors_in, tree_leaves, tree_map
from thunder_cg.compat.thunder import no_autocast

AUTOCAST_DTYPES = frozenset([torch.float32, torch.float16, torch.bfloat16])  # by autocast
GET_DATA = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # what Dynamo makes of ``x.data``
LOG_USAGE = torch._C._log_api_usage_once  # what a module calls where it is made, as in ``nn.SiLU()(x)``


def example(value: Any) -> Any:
    """The arguments of a node, or a node, with fake tensors in the place of nodes, as Dynamo has left them there."""
    return map_arg(value, lambda node: node.meta.get("example_value"))


def on_examples(function: Callable[..., Any], args: Any, kwargs: Any, *, inside: Any = None) -> Any:
    """What a function returns for fake tensors. Tensors that it makes itself are fake, too.

    Where a size is a symbol, an operator that is made of others does that in Python, as under Dynamo.

    Args:
        inside: a dispatch mode, which sees what the function calls.
    """
    leaves = tree_leaves((args, kwargs))
    modes = (leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
    sized = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))]
    in_python = enable_python_dispatcher if any(map(free_symbols, sized)) else nullcontext
    with next(modes, nullcontext()), in_python(), inside or nullcontext():
        return function(*args, **kwargs)


class _Calls(TorchDispatchMode):
    """Notes which operators of PyTorch run inside, and the dtypes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:  # which autocast asks
            self.found.append((func, [each.dtype for each in tensors_in([result])]))
        return result


def _calls_of(node: Node, function: Callable[..., Any]) -> list[tuple[Any, list[torch.dtype]]]:
    """The operators that run in a call of the function where the node is, with its autocasts."""
    calls = _Calls()
    with ExitStack() as stack:
        for kind, dtype, enabled in autocasts_at(node):
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        on_examples(function, example(node.args), example(node.kwargs), inside=calls)
    return calls.found


def reads_values(node: Node, function: Callable[..., Any]) -> bool:
    """Whether the function that a node calls reads on the host what a tensor holds."""
    try:
        _calls_of(node, function)
    except DataDependentOutputException:
        return True
    return False


def _calls_without_autocast(node: Node, function: Callable[..., Any]) -> list[tuple[Any, list[torch.dtype]]] | None:
    """The same without its autocasts; None if the call raises, as it does for tensors of two dtypes."""
    calls = _Calls()
    try:
        on_examples(no_autocast(function), example(node.args), example(node.kwargs), inside=calls)
    except RuntimeError:
        return None
    return calls.found


def depends_on_autocast(node: Node, function: Callable[..., Any]) -> bool:
    """Whether the autocast that a node is inside of casts what the function that it calls gets, or what is inside."""
    if not any(autocasts_at(node)):
        return False
    without = _calls_without_autocast(node, function)
    return without is None or _calls_of(node, function) != without


def dtype_of_casts(node: Node) -> torch.dtype | None:
    """The dtype to which autocast casts all in floating point that the operator of a node gets, before it runs.

    None if autocast casts nothing, or casts inside of the operator.
    """
    function: Any = called_function(node)
    results, inputs = (
        {each.dtype for each in tensors_in([example(of)])} & AUTOCAST_DTYPES for of in (node, node.all_input_nodes)
    )
    if not callable(function) or isinstance(function, HigherOrderOperator) or len(results) != 1 or inputs <= results:
        return None
    (dtype,) = results

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in AUTOCAST_DTYPES else leaf

    def on_casts(*args: Any, **kwargs: Any) -> Any:
        return function(*tree_map(cast, args), **tree_map(cast, kwargs))

    if not any(autocasts_at(node)) or (expected := _calls_without_autocast(node, on_casts)) is None:
        return None
    calls = _calls_of(node, function)
    if calls == _calls_without_autocast(node, function):
        return None
    return dtype if _without_casts(calls) == _without_casts(expected) else None


def _without_casts(calls: list[tuple[Any, list[torch.dtype]]]) -> list[Any]:
    """On CUDA, autocast gives softmax and sums no casts, but the dtype of what they return.

    There, cross entropy rounds the logarithms to 16 bits before it casts them, and this package does not.
    """
    log_softmax = torch.ops.aten._log_softmax.default
    kept = [each for each in calls if each[0] is not torch.ops.aten._to_copy.default]
    return [log_softmax if each[0] is log_softmax else each for each in kept]


def is_wait(node: Node) -> bool:
    """Whether it waits for a functional collective."""
    return str(node.target) == "_c10d_functional.wait_tensor"


def is_collective(node: Node) -> bool:
    """Whether it is a functional collective of PyTorch's."""
    return str(node.target).startswith("_c10d_functional") and not is_wait(node)


def is_unused(collective: Node) -> bool:
    """Whether nothing in the graph but waits uses what it gives."""
    return all(is_wait(user) and not user.users for user in collective.users)


def known_constant(node: Node) -> torch.Tensor | None:
    """The tensor of one number that a call makes of constants alone, as PyTorch knows it; None of all else."""
    value = node.meta.get("example_value") if node.op.startswith("call") else None
    return value.constant if isinstance(value, FakeTensor) else None


def compute_with_grad_mode(node: Node, *, enabled: bool) -> None:
    """Has the node run under ``torch.no_grad``, or with gradients inside of that, as Dynamo writes it."""
    for mode, insert in ((enabled, node.graph.inserting_before), (not enabled, node.graph.inserting_after)):
        with insert(node):
            node.graph.call_function(torch._C._set_grad_enabled, (mode,))


def operator_name(node: Node) -> str:
    """The name of the function or of the method that a node calls; "" if it has none."""
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def called_function(node: Node) -> Any:
    """What a node calls, a method of tensors as a function; None if there is no such method."""
    return getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target


def dtensor_method(node: Node) -> str | None:
    """The method of DTensors that Dynamo, or Thunder's splitter, has made a function of, which the node calls."""
    names = ("from_local", "redistribute", "to_local") if node.op == "call_function" else ()
    return next((name for name in names if name in operator_name(node)), None)


def trains_on_dtensors(graph: Graph) -> bool:
    """Whether it makes DTensors of other tensors, or these of DTensors, with a gradient, which Thunder has none for."""
    untracked = without_gradient(graph)
    found = [node for node in graph.nodes if dtensor_method(node) is not None and node.name not in untracked]
    return any(tensor.requires_grad for tensor in tensors_in([*map(example, found)]))


def numpy_name(node: Node) -> str | None:
    """The name of the function of NumPy's that Dynamo has PyTorch compute in a node: "numpy.random.rand"."""
    function: Any = node.target
    if not isinstance(function, (numpy_to_tensor_wrapper, numpy_operator_wrapper, numpy_method_wrapper)):
        return None
    module = getattr(getattr(function, "f", None), "__module__", "")
    kind = "numpy.random" if module == "torch._numpy.random" else "numpy"
    return f"{kind}.{function.__name__.removeprefix('wrapped_').removeprefix('wrapped_')}"


def is_of_array(node: Node) -> bool:
    """Whether it makes a tensor of an array of NumPy's, for which Dynamo has a tensor."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node.target not in (torch.tensor, torch.as_tensor):
        return False
    return isinstance(getattr(source, "_dynamo_source", None), NumpyTensorSource) or numpy_name(source) is not None


def symbols_in(node: Node) -> frozenset[Any]:
    """The symbols of the integer that a 0-dim tensor of a graph holds, where Dynamo has taken it for a size."""
    value = node.meta.get("example_value")
    number = value.item_memo if isinstance(value, FakeTensor) and value.dim() == 0 else None
    return frozenset(free_symbols(number)) if isinstance(number, torch.SymInt) else frozenset()


def read_number(tensor: Node, for_user: Node) -> Node:
    """A node that reads the number that a tensor of a graph holds, where the graph inserts now, as Dynamo writes it."""
    node = tensor.graph.call_function(numpy_method_wrapper("item"), (tensor,))
    node.meta.update(for_user.meta, example_value=on_examples(torch.Tensor.item, (example(tensor),), {}))
    return node


def symbols_of_sizes(*nodes: Node) -> frozenset[Any]:
    """The symbols in the sizes of tensors of a graph, and in its integers."""
    values = (node.meta.get("example_value") for node in nodes)
    sized = [value for value in values if isinstance(value, (torch.Tensor, torch.SymInt))]
    return frozenset[Any]().union(*map(free_symbols, sized))


def sizes_beside(inputs: Sequence[Node], nodes: Sequence[Node]) -> list[Node] | None:
    """Inputs of the whole graph that give the sizes in nodes of a piece that its inputs do not; None if none does."""
    known = sizes_of(map(example, inputs), map(example, inputs))
    missing = symbols_of_sizes(*inputs, *nodes) - known.keys()
    numbers = (each for each in nodes[0].graph.find_nodes(op="placeholder") if isinstance(example(each), torch.SymInt))
    node_of = {example(each).node.expr: each for each in numbers}
    return [node_of[each] for each in node_of if each in missing] if missing <= node_of.keys() else None


def sizes_of(values: Iterable[Any], given: Iterable[Any]) -> dict[Any, Any]:
    """What symbols are where tensors and numbers are given for fake tensors and symbolic numbers."""
    sizes: dict[Any, Any] = {}
    for value, actual in zip(values, given):
        pairs = zip(value.shape, actual.shape) if isinstance(value, torch.Tensor) else [(value, actual)]
        for number, known in pairs:
            if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
                sizes[number.node.expr] = getattr(known, "value", known)  # of a proxy of Thunder's
    return sizes


def at_sizes(numbers: Iterable[int | torch.SymInt], sizes: dict[Any, Any]) -> tuple[int, ...]:
    """What the numbers are where their symbols are these."""
    return tuple(n if isinstance(n, int) else int(n.node.expr.subs(sizes)) for n in numbers)


def is_read_number(value: Any) -> bool:
    """Whether a number is computed from one that the graph reads from a tensor."""
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and bool(free_unbacked_symbols(value))


def is_of_unknown_size(value: Any) -> bool:
    """Whether there is a tensor whose size depends on what tensors hold."""
    return any(free_unbacked_symbols(tensor) for tensor in tensors_in([value]))


_MODES = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast, torch._C._set_grad_enabled)
Autocast = tuple[str, torch.dtype, bool]  # the type of device, the dtype, whether it casts


def autocasts_at(node: Node) -> Iterator[Autocast]:
    """Those that a node is inside of, the outermost first."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            yield kind, torch.get_autocast_dtype(kind), True
    if not node.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast):
        return
    inside: dict[Any, None] = {}
    for each in takewhile(lambda other: other is not node, node.graph.nodes):
        if each.target is torch.amp.autocast_mode._enter_autocast:
            inside[each] = None
        elif each.target is torch.amp.autocast_mode._exit_autocast:
            inside.pop(each.args[0], None)
    for device_type, dtype, enabled, *_ in (each.args for each in inside):
        yield device_type, dtype or torch.get_autocast_dtype(device_type), enabled


def modes_of(nodes: Iterable[Node]) -> AbstractContextManager[None] | None:
    """The grad mode and the autocast that nodes of a graph run in, to be entered; None if they do not share them."""
    nodes = [*nodes]
    untracked = without_gradient(nodes[0].graph)
    ((is_untracked, casts), *others) = {(node.name in untracked, (*autocasts_at(node),)) for node in nodes}
    if others or any(node.target in _MODES for node in nodes):
        return None

    @contextmanager
    def entered() -> Iterator[None]:
        with torch.set_grad_enabled(not is_untracked), ExitStack() as stack:
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield

    return entered()


def fixed_float(node: Node) -> float | None:
    """The value of a float that Dynamo has fixed, as an operator had to know it: the graph is for this value only."""
    value = node.meta.get("example_value")
    return value.node.maybe_as_float() if isinstance(value, torch.SymFloat) else None


def compute_again(number: Node, graph: Graph) -> Node | int | float | None:
    """Computes a number of a part of a graph from the symbols that the whole graph takes; None if they do not suffice.

    Of what Dynamo has found to be constant meanwhile, it is the constant.

    Args:
        graph: the whole one, which gets nodes where it inserts now.
    """
    values = {node: node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")}
    numbers = {node: value for node, value in values.items() if isinstance(value, torch.SymInt)}
    tracer = GraphAppendingTracer(graph)
    symbols = {value.node.expr: Proxy(node, tracer) for node, value in numbers.items() if value.node.expr.is_Symbol}
    value = number.meta["example_value"]
    if not symbols.keys() >= value.node.expr.free_symbols:
        return None
    computed = sympy_interp(_OnProxies, symbols, value.node.expr)
    if not isinstance(computed, Proxy):
        return computed
    result = computed.node
    result.meta.setdefault("example_value", value)
    return result


def _in_graph(function: Callable[[Any], Any]) -> Any:
    """A handler that calls a function of Python's in the graph, and is given a dtype besides."""

    def handler(number: Any, *dtype: Any) -> Any:
        is_traced = isinstance(number, Proxy)
        return number.tracer.create_proxy("call_function", function, (number,), {}) if is_traced else function(number)

    return staticmethod(handler)


class _OnProxies(PythonReferenceAnalysis):
    """With what PyTorch (2.11) computes on SymPy's numbers there, as where a size is multiplied by a fraction."""

    trunc_to_int = _in_graph(math.trunc)
    floor_to_int = _in_graph(math.floor)
    ceil_to_int = _in_graph(math.ceil)
    round_to_int = _in_graph(round)

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b


def without_gradient(graph: Graph) -> frozenset[str]:
    """Names of the nodes that run under ``torch.no_grad``, as Dynamo saw it: also all, if it compiles there."""
    names = set()
    enabled = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif not enabled:
            names.add(node.name)
    return frozenset(names)


def compute_without_inference_mode(graph: Graph) -> None:
    """Writes ``torch.inference_mode`` as ``torch.no_grad``: Thunder enters it while it traces, and stays there."""
    enabled, before = torch.is_grad_enabled(), dict[Node, bool]()
    for node in [*graph.nodes]:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        if node.target is torch.autograd.grad_mode._enter_inference_mode:
            before[node], mode = enabled, not node.args[0]
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            mode = before[node.args[0]]
        else:
            continue
        enabled = mode
        with graph.inserting_before(node):
            graph.call_function(torch._C._set_grad_enabled, (mode,))
        if node not in before:
            graph.erase_node(node)
    for node in before:
        graph.erase_node(node)


def checkpoints(graph: Graph) -> list[Node]:
    """The calls of checkpointed functions, whose graphs are submodules."""
    return [*graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)]


class SeenNode(NamedTuple):
    """What a report needs of a node of Dynamo's graph: the user's stack, as text, and how to call the operator.

    ``operator`` is None where the splitter names it well; ``is_users`` is False where Dynamo made the node of a
    transform of ``torch.func``.
    """

    stack: str | None
    operator: str | None
    is_users: bool

    @classmethod
    def of(cls, node: Node) -> SeenNode:
        operator = numpy_name(node)
        if node.target is getattr:
            operator = f"Tensor.{node.args[1]}"
        elif node.target is GET_DATA:
            operator = "Tensor.data"
        elif is_of_array(node):
            _, _, line = (node.stack_trace or "").strip().rpartition("\n")
            is_from_numpy = node.target is torch.as_tensor and "from_numpy" in line  # which Dynamo writes so
            operator = "torch.from_numpy" if is_from_numpy else f"torch.{operator_name(node)}"
        elif is_of_transform(node):
            operator = "a transform of torch.func"
        elif (method := dtensor_method(node)) is not None:
            operator = f"DTensor.{method}"
        return cls(node.stack_trace, operator, not is_of_transform(node))


JOINED = "thunder_cg_joined"  # in the meta of a node that stands for others: a `SeenNode` of each, by its name
APART = "thunder_cg_apart"  # in the meta of a node of a piece of Inductor's: why the piece is no operator of a trace


def drop_switches_of_saved_tensor_hooks(graph: Graph) -> None:
    """Drops what forbids hooks of saved tensors around `torch.vmap`, and allows them again.

    A compiled graph does neither when it is called. But whoever traces it does it for the whole process, some of them
    without the end.
    """
    switches = torch._C._autograd._saved_tensors_hooks_disable, torch._C._autograd._saved_tensors_hooks_enable
    for node in [*graph.nodes]:
        if node.target in switches:
            graph.erase_node(node)


def is_of_transform(node: Node) -> bool:
    """Whether a node is what Dynamo makes of a transform of ``torch.func`` itself, and no operator of the user's."""
    return str(getattr(node.target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch"))


def inside_transforms(graph: Graph) -> frozenset[str]:
    """Names of the nodes inside of transforms of ``torch.func``: their tensors are not what they seem to be.

    ``jacrev`` takes such tensors again after the transform that has made them. All up to there is inside.
    """
    names: set[str] = set()
    depth = 0
    nodes = [*graph.nodes]
    position = {node: i for i, node in enumerate(nodes)}
    end = -1  # of what takes tensors of a transform
    for i, node in enumerate(nodes):
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting")
        if depth or i <= end:
            names.add(node.name)
            if any(map(is_functorch_wrapped_tensor, tensors_in(example(node)))):
                end = max([end, *(position[user] for user in node.users)])
        depth -= name.endswith("_decrement_nesting")
    return frozenset(names)
